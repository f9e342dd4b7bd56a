"""Which captions are kept: the most recently used ones that fit the token budget."""

from __future__ import annotations

from stages.text_encoding import CaptionCache


def cache_of(*captions: str, budget: int = 240) -> CaptionCache[str]:
    cache: CaptionCache[str] = CaptionCache(token_budget=budget)
    for caption in captions:
        cache.put(caption, caption.upper(), tokens=80)
    return cache


def test_values_come_back_by_the_exact_caption() -> None:
    cache = cache_of("lift")
    assert cache.get("lift") == "LIFT"
    assert cache.get("lift ") is None
    assert (cache.hits, cache.misses, cache.tokens) == (1, 1, 80)


def test_the_least_recently_used_caption_makes_room() -> None:
    cache = cache_of("a", "b", "c")
    cache.get("a")
    cache.put("d", "D", tokens=80)
    assert [cache.get(caption) for caption in "abcd"] == ["A", None, "C", "D"]
    assert cache.tokens == 240


def test_a_long_caption_displaces_several() -> None:
    cache = cache_of("a", "b", "c")
    cache.put("long", "LONG", tokens=160)
    assert [cache.get(caption) for caption in ("a", "b", "c", "long")] == [None, None, "C", "LONG"]


def test_a_caption_beyond_the_budget_is_not_kept_and_displaces_nothing() -> None:
    cache = cache_of("a")
    cache.put("huge", "HUGE", tokens=320)
    assert cache.get("huge") is None
    assert cache.get("a") == "A"


def test_a_caption_put_again_counts_once() -> None:
    cache = cache_of("a", "a")
    assert cache.tokens == 80


def test_a_budget_of_nothing_keeps_nothing() -> None:
    assert cache_of("a", budget=0).tokens == 0


def test_cleared() -> None:
    cache = cache_of("a", "b")
    cache.clear()
    assert (cache.get("a"), cache.tokens) == (None, 0)
    cache.put("a", "A", tokens=240)
    assert cache.get("a") == "A"
