"""`fp.plan` and `footplate plan`: predict memory, step time and price of a training on hardware that isn't here.

    study.py             the order of events: from a module, a batch and names of hardware to a `Plan`
    subject.py           the training that is planned: a module without weights, an example batch, rows and epochs
    library_models.py    subjects from library models, such as torchvision's
    huggingface_models.py subjects from the configurations of transformers and diffusers
    diffusion_models.py  the training of a U-Net of diffusers
    targets.py           the hardware by name (slices, GPUs, this machine), with its rates from the catalog
    serialized_step.py   a captured step as plain data, with its fingerprint
    program_client.py    starts the compiler's process, waits for it, and caches its results
    compiler.py          the compiler's process: the TPU's own compiler, or XLA for this machine's CPU
    hlo.py               parses a compiled program: its collectives, and the memory that libraries take
    roofline.py          the least time of a step
    largest_batch.py     searches for the largest batch that fits
    choices.py           the results: a `Choice` for each target
    counted_choice.py    the layout, and the batch, that train fastest on GPUs
    layouts.py           how devices share a training: ddp, fsdp, tensor parallelism
    rank_step.py         the needs of a step of one rank, counted from captures
    rank_memory.py       the memory of one rank, from the lifetimes of tensors
    tensor_cut.py        the part of a model that one rank of a tensor-parallel group computes
    equal_blocks.py      equal blocks, of which a few are captured
    batch_rows.py        batch sizes, of which two are captured
    timing.py            the least times of a choice, hours and price
    measure.py           runs some steps on this CPU, to compare them with the prediction
    report.py            a `Plan`: all choices, as text, as JSON values, and as a table
    chart.py             a plan as a picture

A plan trains nothing and holds no weights. Sizes are in bytes and for one device, unless a name says otherwise.
"""
