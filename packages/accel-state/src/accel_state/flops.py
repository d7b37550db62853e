"""Floating-point operations of what torch's own counter lacks. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence


def grouped_product_flops(first: Sequence[int], second: Sequence[int]) -> int:
    """FLOPs of a grouped matrix product, as of the experts of a mixture: two for each multiplication and addition.

    Args:
        first, second: shapes of the operands: (rows, k) and (groups, k, n) with groups of rows; (groups, m, k) and
            (k, columns) with groups of columns; (m, rows) and (rows, n) with groups of rows; or (groups, m, k) and
            (groups, k, n).
    """
    if len(first) == len(second) == 3:
        return 2 * first[0] * first[1] * first[2] * second[2]
    return 2 * first[-2] * first[-1] * second[-1]


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """FLOPs of the two products of attention, of all scores; a backward pass has two and a half times as many.

    Source: Dao, FlashAttention-2, arXiv:2307.08691, section 4.1.

    Args:
        query, key, value: shapes: (batch, heads, tokens, width). Keys and values may have fewer heads.
    """
    batch, heads, tokens, width = query
    return 2 * batch * heads * tokens * key[-2] * (width + value[-1])
