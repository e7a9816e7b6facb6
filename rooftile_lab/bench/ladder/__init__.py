"""From standard attention to the Hopper kernel, one technique at a time."""

# the rungs whose kernels are here for the comparison alone, and all of them, from the bottom
OWN = ("plain", "specialised", "overlapped", "ping-pong")
RUNGS = ("standard", "flash-1", "flash-2", *OWN, "hopper")
