"""Runs a placed step on this machine.

lower/ turns a placement into instructions, codegen/ writes lanes for them, backends/ know the devices that lanes run on, and
step/ has the compiled step that a user calls.
"""
