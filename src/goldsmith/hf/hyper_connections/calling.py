"""Whether calling a module does more than its class's forward, so that the call must not be left out."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


def is_called(module: nn.Module) -> bool:
    """Whether the module has hooks (of its own or global), a forward of its own, or is compiled itself."""
    state = vars(module)
    if any(state[name] for name in HOOKS) or _has_any_global_hook():
        return True
    return "forward" in state or module._compiled_call_impl is not None


def has_called_parts(module: nn.Module) -> bool:
    """Whether one of the module's children is called by the rule of `is_called`."""
    return any(is_called(child) for child in module.children())
