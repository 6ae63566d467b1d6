"""`conductor`'s commands about whole clusters, one file each: simulate, compare, plan, explain, replay."""
