"""No page is lost, freed twice, or owned by two; a page is found only by its tokens and all tokens before it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_rl.generate.engine.pages import Pages

COUNT, TOKENS = 9, 3
SEQUENCES = st.lists(st.integers(0, 1), max_size=COUNT * TOKENS)


class Held(RuleBasedStateMachine):
    """Reference model of holders and contents, which compares tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(COUNT, TOKENS)
        self.holders: list[list[int]] = []
        self.contents: dict[int, list[int]] = {}
        """Name of a page in the model: all tokens up to its end."""

    @precondition(lambda self: self.pages.available)
    @rule(data=st.data(), tokens=SEQUENCES)
    def a_sequence_begins(self, data: st.DataObject, tokens: list[int]) -> None:
        found = self.pages.find(tokens)
        for number, page in enumerate(found, 1):
            assert self.contents[page] == tokens[: number * TOKENS]
        needed = self.pages.needed(len(tokens)) - len(found)
        if needed > self.pages.available:
            self.pages.release(found)
            return
        taken = self.pages.take(needed)
        assert not {*taken} & {page for pages in self.holders for page in pages}
        whole = found + taken
        assert len({*whole}) == len(whole)
        self.holders.append(whole)
        for page in taken:
            self.contents.pop(page, None)
        if data.draw(st.booleans()):
            self.pages.name(tokens, whole)
            for number in range(len(found), len(tokens) // TOKENS):
                self.contents[whole[number]] = tokens[: (number + 1) * TOKENS]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def one_holds_what_another_does(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        self.pages.hold(pages)
        self.holders.append([*pages])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def one_lets_go(self, data: st.DataObject) -> None:
        self.pages.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def weights_change(self) -> None:
        self.pages.forget()
        assert self.pages.find([0] * TOKENS) == self.pages.find([1] * TOKENS) == []

    @invariant()
    def every_page_is_held_or_available(self) -> None:
        held = Counter(page for pages in self.holders for page in pages)
        assert self.pages.available == COUNT - len(held)

    def teardown(self) -> None:
        for pages in self.holders:
            self.pages.release(pages)
        assert self.pages.available == COUNT
        assert sorted(self.pages.take(COUNT)) == [*range(COUNT)]


Held.TestCase.settings = examples(30, stateful_step_count=25)
test_pages_are_neither_lost_nor_given_twice = Held.TestCase


def test_only_full_pages_of_a_matching_prefix_are_found() -> None:
    pages = Pages(COUNT, TOKENS)
    first = pages.take(3)
    pages.name([1, 2, 3, 4, 5, 6, 7, 8], first)
    assert pages.find([1, 2, 3, 4, 5, 6, 7, 8]) == first[:2]
    assert pages.find([1, 2, 3, 4, 5]) == first[:1]
    assert pages.find([9, 2, 3, 4, 5, 6]) == []
    assert pages.find([4, 5, 6]) == [], "the same tokens at another position differ"


def test_found_page_gets_another_holder() -> None:
    pages = Pages(1, TOKENS)
    taken = pages.take(1)
    pages.name([1, 2, 3], taken)
    pages.release(taken)
    assert pages.available == 1
    assert (pages.find([1, 2, 3]), pages.available) == (taken, 0)


def test_first_of_two_equal_pages_is_found_and_no_page_has_two_names() -> None:
    pages = Pages(2, TOKENS)
    one, other = pages.take(1), pages.take(1)
    for each in (one, other):
        pages.name([1, 2, 3], each)
    pages.name([4, 5, 6], one)
    assert (pages.find([1, 2, 3]), pages.find([4, 5, 6])) == (one, [])


def test_pages_released_first_are_forgotten_first_and_the_end_of_a_sequence_before_its_prefix() -> None:
    pages = Pages(4, TOKENS)
    sequences = [[1] * 6, [2] * 6]
    for tokens in sequences:
        taken = pages.take(2)
        pages.name(tokens, taken)
        pages.release(taken)
    lengths = []
    for _ in range(4):
        pages.take(1)
        found = [pages.find(tokens) for tokens in sequences]
        lengths.append([len(each) for each in found])
        for each in found:
            pages.release(each)
    assert lengths == [[1, 2], [0, 2], [0, 1], [0, 0]]
    assert all(sum(later) < sum(earlier) for earlier, later in pairwise(lengths))


def test_too_many_releases_and_too_large_requests_are_errors() -> None:
    pages = Pages(2, TOKENS)
    taken = pages.take(2)
    with pytest.raises(AssertionError, match="1 pages of 0"):
        pages.take(1)
    pages.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        pages.release(taken[:1])


def test_without_names_no_page_is_found() -> None:
    pages = Pages(2, TOKENS, reusable=False)
    pages.name([1, 2, 3], pages.take(1))
    assert pages.find([1, 2, 3]) == []
