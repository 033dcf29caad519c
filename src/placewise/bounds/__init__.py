"""What no placement can beat: lower bounds of the step time, each with a certificate that anyone can check.

host        every op is launched once
path        the longest chain of ops, with the copies that can't be avoided
work        the time and the memory that the devices have to share
window      the same for ops that can neither start early nor end late
segments    a chain of ops cuts the step; what comes between two of them runs on one device, or pays for copies
"""
