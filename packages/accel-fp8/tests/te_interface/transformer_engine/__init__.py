"""The interface of Transformer Engine that its documentation gives, without its kernels: it says what it was called
with.

https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""
