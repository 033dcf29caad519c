"""What no placement can beat: lower bounds of the step's time, each with a certificate that anyone can check.

host        every op is launched once
path        the longest chain of ops, with the copies that can't be avoided
work        what the devices must share: time, and memory
window      the same, for ops that can neither begin early nor end late
segments    a chain of ops cuts the step; what lies between two of them is on one device, or pays for copies
"""
