"""Bytes near those of a good file, which get deeper into a reader than bytes at random."""

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with some bytes changed, cut out or put in, or cut short; or other bytes altogether."""
    kind = draw(st.sampled_from(["change", "change", "cut", "insert", "end", "other"]))
    if kind == "other":
        return draw(st.binary(max_size=300))
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(changed) - 1)))
        some = draw(st.binary(min_size=1, max_size=4))
        if kind == "change":
            changed[place : place + len(some)] = some
        elif kind == "cut":
            del changed[place : place + 16 * len(some)]
        elif kind == "insert":
            changed[place:place] = some
        else:
            del changed[place:]
    return bytes(changed)
