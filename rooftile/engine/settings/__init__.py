"""The settings of an engine.

config    EngineConfig: the settings, checked when they are made
table     all settings, for Python and for the commands
changed   shows the settings that are not the usual ones
"""
