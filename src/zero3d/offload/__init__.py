"""ZeRO-Offload: what leaves the device for the memory or disks of its host, and the updates there."""
