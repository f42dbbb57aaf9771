"""A recipe, short enough to read, that gives each module the scheme chosen for it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe, Rule


def compact_recipe(
    chosen: Mapping[str, QuantScheme],
    others: Iterable[str] = (),
    *,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
) -> QuantRecipe:
    """A recipe with which :meth:`QuantRecipe.decide` gives each module of ``chosen`` its scheme.

    The commonest scheme becomes the default; the others get one rule for all modules that are alike but
    for their layer. ``others``: modules that no rule may name. ``include``, ``exclude``: taken over.
    """
    default = Counter(chosen.values()).most_common(1)[0][0]
    others = list(others)
    for rules in (_short_rules(chosen, default), _full_rules(chosen, default)):
        recipe = QuantRecipe(rules=tuple(rules), default=default, include=include, exclude=exclude)
        right = all(recipe.decide(module).scheme == scheme for module, scheme in chosen.items())
        if right and not any(rule.matches(module) for rule in recipe.rules for module in others):
            return recipe
    raise AssertionError("full names match themselves only")


def to_yaml(recipe: QuantRecipe, comment: str = "") -> str:
    """A recipe's text for :meth:`QuantRecipe.from_file`, with ``comment`` on top."""
    import yaml

    data: dict[str, object] = {}
    if recipe.rules:
        data["rules"] = [{r.pattern: r.scheme.text if r.scheme else "dense"} for r in recipe.rules]
    data["default"] = recipe.default.text if recipe.default else "dense"
    for name in ("include", "exclude"):
        if patterns := getattr(recipe, name):
            data[name] = list(patterns)
    lines = [f"# {line}".rstrip() + "\n" for line in comment.splitlines()]
    return "".join(lines) + yaml.safe_dump(data, sort_keys=False, width=10_000)


def _short_rules(chosen: Mapping[str, QuantScheme], default: QuantScheme) -> Iterator[Rule]:
    r"""First the exceptions, like ``\blayers\.(3|5)\.mlp\.up_proj$``, then what holds in all other layers.

    ``\bmlp\.up_proj$`` gives the scheme that is commonest among modules of that ending.
    """
    numbers: dict[tuple[str, str], dict[QuantScheme, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, scheme in chosen.items():
        start, where, ending = _split(module)
        numbers[start, ending][scheme].append(where)
    endings: dict[tuple[QuantScheme, str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (start, ending), places in numbers.items():
        common = max(places, key=lambda s: (len(places[s]), s == default)) if ending else default
        for scheme, layers in places.items():
            if scheme != common:
                endings[scheme, start, tuple(layers)].append(ending)
            elif scheme != default:
                endings[scheme, start, ()].append(ending)
    for (scheme, start, alike), tails in sorted(endings.items(), key=lambda rule: not rule[0][2]):
        word = start.rstrip(".").rpartition(".")[2]
        parts = [re.escape(word), _any_of(alike)] if alike and start else []
        if tails != [""]:
            parts.append(_any_path(tails))
        yield Rule((r"\b" if start else "^") + r"\.".join(parts) + "$", scheme)


def _full_rules(chosen: Mapping[str, QuantScheme], default: QuantScheme) -> Iterator[Rule]:
    members: dict[QuantScheme, list[str]] = defaultdict(list)
    for module, scheme in chosen.items():
        members[scheme].append(module)
    for scheme, modules in members.items():
        if scheme != default:
            yield Rule(f"^{_any_of(modules)}$", scheme)


def _split(module: str) -> tuple[str, str, str]:
    """A name up to its first number, from there to its last, and after it: ``layers.``, ``3``, ``mlp.up_proj``."""
    parts = module.split(".")
    places = [i for i, part in enumerate(parts) if part.isdigit()]
    if not places:
        return "", "", module
    first, last = places[0], places[-1] + 1
    return ".".join(parts[:first]) + ".", ".".join(parts[first:last]), ".".join(parts[last:])


def _any_path(names: list[str]) -> str:
    """Names in parts, what they begin with alike said once: ``mlp\\.(gate_proj|up_proj)``."""
    split = [name.split(".") for name in names]
    alike = 0
    while alike < min(map(len, split)) - 1 and len({tuple(parts[: alike + 1]) for parts in split}) == 1:
        alike += 1
    head = [re.escape(part) for part in split[0][:alike]]
    return r"\.".join([*head, _any_of(".".join(parts[alike:]) for parts in split)])


def _any_of(texts: Iterable[str]) -> str:
    texts = [re.escape(t) for t in texts]
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"
