"""What is asked for, read by the public functions, and made a page of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.api.checkpoints import Checkpoints
from xla_ckpt.api.diff import Difference, diff
from xla_ckpt.api.explain import explain
from xla_ckpt.api.summaries import fields_of, summaries_below
from xla_ckpt.api.tags import located
from xla_ckpt.engine.difference import Distance
from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.layouts.no_tag import check_lies_there, no_tag
from xla_ckpt.storage.door import store_at
from xla_ckpt.tables.texts import size
from xla_ckpt.view.document import one_document
from xla_ckpt.view.pages import Address, Page, Pages

MAX_TIMED = 200
"""Tags of which the report of the save is read for the first page, the newest ones."""

MAX_COMPARED = 1 << 30
"""Bytes of arrays that a page compares, at most: who waits for a page does not wait for terabytes."""

MAX_PAGES = 10
"""Tags that have a page in a single document, the newest ones."""


class ViewedRoot:
    """The pages of one root directory. They are read when they are asked for, so they are always new.

    Args:
        path: Root directory; or a tag or a file itself, of which the first page is that of the tag.
        tag: Which one, where the root is named and its tag is meant alone.
        about: For tags that another library wrote: what their files do not say, as the arguments of `show`.
    """

    def __init__(self, path: str, tag: str | None = None, **about: Any) -> None:
        store, self.only = located(path, tag)
        if self.only is None:
            check_lies_there(store)
        self.root = Checkpoints(store.path)
        self.about = about

    def page(self, address: Address, pages: Pages) -> Page:
        """The page that is asked for.

        Raises:
            CheckpointError: It cannot be read, or makes no sense.
        """
        tag = address.get("tag") or self.only
        match address.get("page", ""):
            case "" if self.only is None:
                return self._root(pages)
            case "" | "tag":
                return self._tag(tag, address.get("leaf") or None, pages)
            case "array":
                sample = self.root.sample(address.get("leaf", ""), tag, **self.about)
                return pages.array(sample.to_json())
            case "save":
                return pages.save(self.root.timings(tag))
            case "plan":
                text = address.get("mesh", "")
                return pages.plan(explain(self.root.path, tag, mesh=text, **self.about).to_json())
            case "compare":
                return self._compare(address, pages)
        raise UsageError("there is no such page", found=address["page"][:80])

    def one_document(self, address: Address) -> bytes:
        """The first page, the newest tags and their saves in one document.

        Args:
            address: What is shown besides: of the newest tag the arrays that are like a pattern (`leaf`), the plan of a
                restore over a mesh (`mesh`), and what differs from another tag (`a`).

        Raises:
            CheckpointError: There is no tag of which something is asked for besides, or no such plan or difference.
        """
        tags = self.root.tags()[-MAX_PAGES:][::-1] if self.only is None else [self.only]
        if address and not tags:
            raise no_tag(store_at(self.root.path), None)
        timed = self._timings(tags)
        addresses: list[Address] = [] if self.only is not None else [{}]
        for tag in tags:
            addresses += [{"page": "tag", "tag": tag}] + ([{"page": "save", "tag": tag}] if tag in timed else [])
        if "leaf" in address:
            contents = self.root.show(tags[0], leaf=address["leaf"], **self.about)
            addresses += [{"page": "array", "tag": tags[0], "leaf": array.leaf} for array in contents.arrays]
        asked: list[Address] = []
        if "mesh" in address:
            asked.append({"page": "plan", "tag": tags[0], "mesh": address["mesh"]})
        if "a" in address:
            asked.append({"page": "compare", "a": address["a"], "b": tags[0], "leaf": address.get("leaf", "")})
        names = {frozenset(item.items()): f"page-{number}" for number, item in enumerate([*addresses, *asked])}

        def href(target: Address) -> str | None:
            name = names.get(frozenset(target.items()))
            return None if name is None else f"#{name}"

        pages = Pages(href=href, level=2, live=False)
        # Of several tags one that is damaged hides no other one. One that was named has to be there.
        page = self.page_or_problem if self.only is None else self.page
        shown = [page(item, pages) for item in addresses] + [self.page(item, pages) for item in asked]
        return one_document(f"Checkpoints in {self.root.path}", list(zip(names.values(), shown, strict=True)))

    def page_or_problem(self, address: Address, pages: Pages) -> Page:
        """The page that is asked for, or one that says why there is none: a damaged tag hides no other one."""
        try:
            return self.page(address, pages)
        except CheckpointError as error:
            return pages.problem(str(error))

    def _root(self, pages: Pages) -> Page:
        tags = [fields_of(summary) for summary in self.root.summaries()]
        timed = self._timings([tag["tag"] for tag in tags[-MAX_TIMED:]])
        return pages.root(self.root.path, tags, timed, summaries_below(self.root.path, {tag["tag"] for tag in tags}))

    def _timings(self, tags: list[str]) -> dict[str, dict[str, Any]]:
        """What the ranks measured, of those tags that keep it."""
        timed = {}
        for tag in tags:
            try:
                timed[tag] = self.root.timings(tag)
            except CheckpointError:
                continue  # it has none, or a damaged one: a tag's own page leads to what is wrong
        return timed

    def _tag(self, tag: str | None, leaf: str | None, pages: Pages) -> Page:
        contents = self.root.show(tag, leaf=leaf, **self.about)
        try:
            self.root.timings(contents.tag)
        except UsageError:  # it keeps none
            return pages.tag(contents.to_json(), has_report=False)
        except CheckpointError:
            pass  # it is damaged, which its own page says
        return pages.tag(contents.to_json(), has_report=True)

    def _compare(self, address: Address, pages: Pages) -> Page:
        leaf = address.get("leaf") or None
        contents = self.root.show(address.get("a"), leaf=leaf, **self.about)
        nbytes = sum(array.nbytes for array in contents.arrays)
        if nbytes > MAX_COMPARED:
            raise UsageError(
                "a page compares fewer bytes",
                expected=f"at most {size(MAX_COMPARED)}",
                found=size(nbytes),
                hint="Say which leaves, or run xla-ckpt diff.",
            )
        path = self.root.path
        difference = diff(path, path, address.get("a"), address.get("b"), leaf=leaf, **self.about)
        return pages.compare(difference.to_json(), {k: how.to_json() for k, how in _by_layer(difference).items()})


def _by_layer(difference: Difference) -> Mapping[str, Distance]:
    """The sum over the arrays that moved, for each layer, or each part of the state where names have no number."""
    layers: dict[str, Distance] = {}
    for leaf, how in difference.moved.items():
        layers[layer_of(leaf)] = layers.get(layer_of(leaf), Distance()) + how
    return layers


def layer_of(leaf: str) -> str:
    """The layer that an array belongs to: its name up to the first number, without what lies deeper.

    >>> layer_of("model/layers.12.mlp.up.weight"), layer_of("model/norm.weight"), layer_of("a/0.w/b")
    ('model/layers.12', 'model', 'a/0')
    """
    taken = ""
    for part in leaf.replace("/", "/ ").replace(".", ". ").split(" "):
        taken += part
        if part.rstrip("/.").isdigit():
            return taken.rstrip("/.")
    return leaf.split("/", maxsplit=1)[0]
