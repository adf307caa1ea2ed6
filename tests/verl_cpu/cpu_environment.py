"""Importing this before verl makes its engines run on the CPU, in a process group of one unless torchrun says more."""

import os

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "rlhf_losses",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
}
for _name, _value in {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}.items():
    os.environ.setdefault(_name, _value)
