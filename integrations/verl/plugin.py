"""Entry point of the group verl.plugins: loaded with verl wherever this package is installed, used only when asked for.

verl swallows what a plugin raises. What goes wrong, such as a version of verl that is not served, is said here.
"""

import logging

try:
    import rlhf_losses.integrations.verl  # noqa: F401
except Exception as error:
    logging.getLogger(__name__).warning("rlhf_losses is not available as impl_backend: %s", error)
