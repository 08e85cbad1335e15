"""apply: replaces the classes of a model's hyper-connections by ours, and puts them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from ..dispatch import register
from ..experts_spec import experts_modules, name_of
from .checks import check_module
from .families import FAMILIES, Known, known
from .trial import check_formulas

SELECTED = "_experts_implementation_internal"  # a config's attribute
METHODS = ("forward", "_activate_lora")  # `register` sets them on experts without dispatch, and on peft's wrappers


@dataclass(frozen=True)
class ReplacedModule:
    """A module that computes with goldsmith's operators. kind: its class in transformers; computes: with what."""

    path: str
    module: nn.Module
    kind: str
    computes: str


@dataclass
class Applied:
    """What `apply` replaced in a model: `print` shows it, `undo` puts it back."""

    model: nn.Module
    families: tuple[str, ...]
    replaced: tuple[ReplacedModule, ...]
    _before: list[tuple[ReplacedModule, type[nn.Module], type[nn.Module]]] = field(repr=False)
    _experts: Callable[[], None] | None = field(repr=False)
    _undone: bool = field(default=False, repr=False)

    def undo(self) -> nn.Module:
        """Puts back the classes and the experts implementation, and returns the model. Weights are untouched.

        Raises ValueError, with nothing changed, if it was undone before, or if a module has another class now: FSDP and
        parametrizations make one.
        """
        if self._undone:
            raise ValueError("goldsmith.hf.apply: this was undone before")
        for one, _, ours in self._before:
            if type(one.module) is not ours:
                raise ValueError(
                    f"goldsmith.hf.apply: {one.path} is a {type(one.module).__name__} made after apply (FSDP and "
                    "parametrizations make a class of their own), so it cannot be undone. Undo before that"
                )
        for one, before, _ in self._before:
            one.module.__class__ = before
        if self._experts is not None:
            self._experts()
        self._undone = True
        return self.model

    def __str__(self) -> str:
        head = f"{type(self.model).__name__}: {', '.join(self.families) or 'experts'}"
        counts = Counter((one.kind, one.computes) for one in self.replaced)
        width = max((len(kind) for kind, _ in counts), default=0)
        rows = [f"  {count:>4} {kind:<{width}}  {computes}" for (kind, computes), count in counts.items()]
        return "\n".join([head + (" (undone)" if self._undone else ""), *rows])


def apply(model: nn.Module, *, mhc: bool = True, experts: bool = False) -> Applied:
    """Makes a transformers model compute its hyper-connections with goldsmith.mhc; returns what was replaced.

    model    a model of deepseek_v4, glm5_next, hy_v4 or qwen4_exp (transformers 5.17 or later), also inside peft's
    mhc      replace the hyper-connections: the modules get classes of ours that are subclasses of theirs
    experts  also `goldsmith.hf.register(model)`: experts by goldsmith.experts

    Parameters, buffers, names and hooks stay as they are, so optimizers, state_dict and save_pretrained do not notice.
    Call it before fully_shard, torch.compile and peft's target_parameters. `print(applied)` lists what was replaced,
    `applied.undo()` puts it back. Raises ValueError, with nothing changed: for a model without hyper-connections, one
    that is applied already, a forward that hooks or patches have changed, another number of streams, and formulas that
    differ in the installed transformers.
    """
    if not (mhc or experts):
        raise ValueError("goldsmith.hf.apply: mhc and experts are both False, so there is nothing to apply")
    known_modules = _checked(model) if mhc else []
    restore = _with_experts(model) if experts else None
    before = []
    for one, of in known_modules:
        theirs, ours = type(one.module), _class_for(type(one.module), of)
        one.module.__class__ = ours
        before.append((one, theirs, ours))
    replaced = [one for one, _ in known_modules]
    if experts:
        replaced += [ReplacedModule(path, m, name_of(m), "experts.moe") for path, m in experts_modules(model)]
    families = tuple(dict.fromkeys(of.family.model_type for _, of in known_modules))
    return Applied(model, families, tuple(replaced), before, restore)


def _checked(model: nn.Module) -> list[tuple[ReplacedModule, Known]]:
    """Every module to replace, after all checks."""
    modules = [(path, module, known(module)) for path, module in model.named_modules()]
    known_modules = [(path, module, of) for path, module, of in modules if of is not None]
    if not any(of.part == "connection" for _, _, of in known_modules):
        names = ", ".join(family.model_type for family in FAMILIES)
        raise ValueError(
            f"goldsmith.hf.apply: {type(model).__name__} has no hyper-connections that goldsmith knows: those of "
            f"transformers' {names}"
        )
    for path, module, of in known_modules:
        check_module(path, module, of)
    tried: set[object] = set()
    for path, module, of in sorted(known_modules, key=lambda one: one[2].part == "layer"):  # its parts first
        alike = (of.kind, getattr(module, "block_type", None), *(type(child) for child in module.children()))
        if alike not in tried:
            check_formulas(path, module, of)
            tried.add(alike)
    return [(ReplacedModule(path, module, of.kind.__name__, of.computes), of) for path, module, of in known_modules]


def _class_for(theirs: type[nn.Module], of: Known) -> type[nn.Module]:
    """Our class, or for a subclass of transformers' (FSDP makes one) a subclass of both."""
    return of.ours if theirs is of.kind else type(theirs.__name__, (of.ours, theirs), {})


def _with_experts(model: nn.Module) -> Callable[[], None]:
    """Selects goldsmith's experts; returns the function that puts back what was selected before."""
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if hasattr(c, SELECTED)}
    selected = [(config, getattr(config, SELECTED)) for config in configs.values()]
    before = _own_methods(model)

    def restore() -> None:
        for config, name in selected:
            setattr(config, SELECTED, name)
        for module, name in set_by_us:
            vars(module).pop(name, None)

    try:
        register(model)
    finally:
        set_by_us = _own_methods(model) - before
    return restore


def _own_methods(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """Attributes on experts and on peft's wrappers that stand in for methods: `register` sets some."""
    return {(module, name) for module in model.modules() for name in METHODS if name in vars(module)}
