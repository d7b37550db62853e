"""Operations on nested data: lists, tuples, dictionaries, named tuples, data classes and batch objects of tensors."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
