"""One GPU, in nine minutes: is what it computes right, and how fast, with how much memory?"""
