"""Figures of measurements that stand by themselves."""
