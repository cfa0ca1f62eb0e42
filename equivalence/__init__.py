"""The engine that proves the twins equal to the law: comparison, lockstep and free running, bisection, ordering."""
