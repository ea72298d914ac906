"""Workers on the machines of a cluster: agents there, a crew here, one protocol between them, and who places the agents.

crew.py          the driver's end: a `Crew` whose hands are agents
agent.py         the far end: a `LocalCrew` served over a connection
door.py          where agents come in; greeting.py: who they are, and how both sides prove it
refusals.py      a log of refused connections with a limited rate
channel.py       messages and parcels on a connection
seating.py       which rank lives with which agent
placement.py     the contract of what starts agents: ray.py and spark.py, which ask their engines by ray_session.py and
                 spark_session.py, and machines.py, for people
"""
