"""The command line: `footplate COMMAND …`.

`main` knows the commands by name and imports only the one that was asked for, so that `footplate --help` is quick. Every
command is a module with two functions:

    parser(name)      →  its ArgumentParser (shell completion asks all of them for it)
    run(name, argv)   →  its exit code

and, if it has commands of its own (`footplate checkpoint inspect`), a third one, `add_actions(parser)`, which adds them.

`parsing` turns what jsonargparse says of a mistake into one readable message (`explain`), and tells a mistake on the
command line from a failure of the user's code. `accepted` says which classes an option takes. `preview` shortens values
that are too long to show, and `show` prints what rich draws.
"""
