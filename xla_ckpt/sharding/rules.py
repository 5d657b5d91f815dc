"""Rules that say how arrays are split that do not say it themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xla_ckpt.errors import UsageError
from xla_ckpt.sharding.sharding import Sharding

Rules = Sequence[tuple[str, Any]]
"""(regular expression, spec): the first expression that is found in a leaf's path or name decides."""

Parsed = Sequence[tuple[re.Pattern[str], Sharding]]


def parse_rules(rules: Rules | None) -> Parsed:
    """The caller's rules.

    Raises:
        UsageError: One of them is malformed.
    """
    if isinstance(rules, Mapping):
        raise UsageError(
            "rules of shardings are a list, of which the first that fits decides",
            found="a dict",
            hint="Write [(regular expression, spec), ...]; of this dict list(shardings.items()) makes one.",
        )
    parsed = []
    for rule in rules or ():
        try:
            pattern, spec = rule
            parsed.append((re.compile(pattern), Sharding.parse(spec)))
        except (ValueError, TypeError, re.error) as error:
            raise UsageError(
                f"a rule of shardings makes no sense: {error}",
                found=repr(rule),
                hint="Write a regular expression and a spec, as in shardings=[(r'\\.up_proj', ('tp', None))] "
                "(--sharding '\\.up_proj' tp,_).",
            ) from error
    return tuple(parsed)


def idle(rules: Parsed, leaves: Iterable[str]) -> list[str]:
    """Rules in which no leaf is found, as messages: each is a typing error, or belongs to another pipeline stage."""
    leaf_paths = list(leaves)
    return [
        f"no leaf path has a part that the sharding rule ({rule[0].pattern!r}, {rule[1].spec}) fits"
        for rule in rules
        if all(decided([rule], path, path.partition("/")[2]) is None for path in leaf_paths)
    ]


def decided(rules: Parsed, *names: str) -> Sharding | None:
    """What the first rule says that is found in one of an array's names; None if there is none."""
    rule = deciding(rules, *names)
    return None if rule is None else rule[1]


def deciding(rules: Parsed, *names: str) -> tuple[re.Pattern[str], Sharding] | None:
    """The first rule that is found in one of an array's names; None if there is none."""
    return next((rule for rule in rules if any(rule[0].search(name) for name in names)), None)
