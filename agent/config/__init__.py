"""The configuration: its keys, the file that sets them, and the settings that the agent runs with."""
