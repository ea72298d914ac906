"""Workers on the machines of a cluster: agents there, one worker group here, one protocol between them.

agent_group.py      the driver's end: a `WorkerGroup` that controls agents
agent.py            the far end: a `LocalWorkerGroup`, controlled over a connection
listener.py         accepts agents; agent_info.py: what they tell about themselves in the handshake
refusal_log.py      a log of refused connections with a limited rate
channel.py          messages and payloads on a connection
rank_assignment.py  which rank gets which allocation
placement.py        the contract of engines, which start agents: ray.py and spark.py, with ray_session.py and
                    spark_session.py for their clusters, and machines.py, for machines that people start
"""
