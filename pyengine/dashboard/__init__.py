"""The dashboard at /dashboard: what the cluster does just now, how requests went and why, and a place to try the model.

    gateway's service --feed.py--> view.py: plain data --drawing.py: HTML--> pages.py (NiceGUI) --web socket--> browsers

It only looks. lazy.py puts it before the gateway's application and imports the rest with its first visitor.
"""
