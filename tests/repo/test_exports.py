"""What is public is said once."""

import importlib
import pkgutil

import pytest

import goldsmith

PACKAGES = [
    "goldsmith",
    *(f"goldsmith.{name}" for name in ("assay", "experts", "hf", "mhc", "offload", "router")),
]


def modules():
    """Every module that can be imported without a backend's own requirements."""
    for entry in pkgutil.walk_packages(goldsmith.__path__, "goldsmith."):
        if not any(part.startswith("_") for part in entry.name.split(".")):
            yield entry.name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists_and_says_what_it_is(package):
    module = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value):
            assert value.__doc__, f"{package}.{name} has no docstring"


def test_every_public_name_is_exported_by_one_package_only():
    seen: dict[str, str] = {}
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            assert name not in seen, f"{name} is exported by {seen[name]} and by {package}"
            seen[name] = package


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="public names: .*assay.*mhc"):
        goldsmith.nosuch  # noqa: B018


def test_names_that_a_package_lists_are_those_that_dir_shows():
    assert set(goldsmith.__all__) == set(dir(goldsmith))


def test_every_module_can_be_imported_and_has_a_docstring():
    assert [name for name in modules() if not importlib.import_module(name).__doc__] == []
