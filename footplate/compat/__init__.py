"""Names of other libraries over Footplate: Lightning, Petastorm, Horovod and TensorFlow's Estimator.

Lightning's objects run on Footplate's trainer through an adapter (`compat/lightning/adapter.py`), which
`footplate/__init__.py` registers. The other three are packages that a program imports in place of the original:

    import footplate.compat.horovod as hvd                         # was: import horovod.torch as hvd
    from footplate.compat.petastorm import make_spark_converter    # was: from petastorm.spark import make_spark_converter
    from footplate.compat import estimator                         # was: tensorflow.estimator

No code below this package imports it.
"""
