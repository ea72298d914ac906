"""The command line: `footplate COMMAND …`.

`main` finds the command by its name in `commands`, and imports only the module of that command, so that
`footplate --help` is quick. The module of a command has two functions:

    parser(name)      →  its ArgumentParser; shell completion asks every command for it
    run(name, argv)   →  its exit code

A command with actions (`footplate checkpoint inspect`) has a third function, `add_actions(parser)`, which adds them.

Most commands read their arguments with argparse (`arguments`). `fit`, `validate`, `test` and `predict` take classes and
configuration files, and read them with jsonargparse (`fit_arguments`): `class_types` has the classes that an option takes,
and `explain` shortens the errors. `formats` prints results, and `preview` shortens long values.
"""
