"""Pipeline parallelism on torch.distributed.pipelining: every rank runs the model's own forward and computes the module
calls of its stages. Used for inference by ``prepare_pippy`` and for training by ``accel.parallel.pipeline``.
"""
