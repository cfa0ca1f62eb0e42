"""The law: every decode stage of Kimi K3 in plain PyTorch."""
