"""The tree against a brute-force reading of the text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.draft.suffix.tree import Child, Node, SuffixTree

TEXTS = st.integers(1, 3).flatmap(lambda most: st.lists(st.integers(0, most), max_size=45))
DEPTHS = st.sampled_from([2, 3, 5, 8, 64])


def longest_repeat(text: list[int], max_depth: int) -> int:
    """Length of the longest suffix that occurred before, below max_depth."""
    found = 0
    for length in range(1, min(max_depth, len(text))):
        places = range(len(text) - length)
        if any(text[i : i + length] == text[len(text) - length :] for i in places):
            found = length
    return found


def occurrences(tree: SuffixTree, substring: list[int]) -> list[int]:
    """Where it begins, of those that the tree has counted."""
    counted = len(tree.tokens) - longest_repeat(tree.tokens, tree.max_depth)
    return [i for i in range(counted) if tree.tokens[i : i + len(substring)] == substring]


def substring_of(tree: SuffixTree, child: Child, parent: Node) -> list[int]:
    """What a child stands for, or one token more than its parent where it occurred once."""
    if isinstance(child, int):
        return tree.tokens[child : child + parent.depth + 1]
    return tree.tokens[child.start : child.start + child.depth]


def check(tree: SuffixTree, node: Node) -> None:
    """Every count, latest start, best child and link below a node."""
    substring = tree.tokens[node.start : node.start + node.depth]
    counts = []
    for key, child in node.children.items():
        longer = substring_of(tree, child, node)
        places = occurrences(tree, longer)
        assert longer[: node.depth + 1] == [*substring, key]
        counts.append((len(places), max(places), key))
        if isinstance(child, int):
            assert places == [child]
            continue
        assert child.parent is node
        assert (child.count, child.start) == (len(places), max(places))
        assert len(child.children) >= 2 or child.depth == tree.max_depth
        if child.children:
            linked = tree.tokens[child.link.start : child.link.start + child.link.depth]
            assert linked == longer[1:]
        check(tree, child)
    if node is not tree.root and counts:
        assert (node.best_count, node.best) == max(counts)[::2]
        assert node.count == sum(count for count, _, _ in counts)


@settings(max_examples=200)
@given(TEXTS, DEPTHS, st.data())
def test_everything_is_counted(text: list[int], max_depth: int, data: st.DataObject) -> None:
    tree, done = SuffixTree(max_depth), 0
    while done < len(text):
        step = data.draw(st.integers(1, 15))
        tree.extend(text[done : done + step])
        done += step
        assert tree.length == longest_repeat(tree.tokens, max_depth)
        check(tree, tree.root)
    assert tree.tokens == text


@settings(max_examples=200)
@given(TEXTS, DEPTHS)
def test_the_repeated_suffix_has_its_deepest_node(text: list[int], max_depth: int) -> None:
    tree = SuffixTree(max_depth)
    tree.extend(text)
    start = len(text) - tree.length
    assert tree.node is tree.deepest(tree.root, tree.length, start)
    assert (
        text[tree.node.start : tree.node.start + tree.node.depth]
        == (text[start : start + tree.node.depth])
    )


@settings(max_examples=200)
@given(TEXTS, DEPTHS, st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_contains_what_it_has_counted(
    text: list[int], max_depth: int, substring: list[int]
) -> None:
    tree = SuffixTree(max_depth)
    tree.extend([*text, 9])
    substring = substring[:max_depth]
    assert tree.contains(substring) == bool(occurrences(tree, substring))


def test_size_is_linear_in_the_text() -> None:
    """Copies of copies: every position repeats, none has an entry for each length."""
    tree = SuffixTree(64)
    tree.extend(list(range(500)) * 4)

    def nodes(node: Node) -> int:
        inner = [child for child in node.children.values() if isinstance(child, Node)]
        return 1 + sum(map(nodes, inner))

    assert nodes(tree.root) <= 501
