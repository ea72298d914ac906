"""The parts that all of Footplate's own connections share: framing and the handshake.

Importing this package imports neither of them.
"""
