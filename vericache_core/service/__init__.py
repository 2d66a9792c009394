"""What every long-running process of ours needs: metrics, health, logs and a way to stop.

A service reads like this::

    metrics = Metrics()
    configure_logs()
    with Service("0.0.0.0", 9431, metrics) as service, draining(service, stop=server.stop_accepting) as drain:
        ...                              # load: /readyz says 503 until the state is "ready"
        EngineWatch.attach(engine, metrics)
        service.ready()
        drain.wait()                     # SIGTERM, SIGINT or drain.begin()
        drain.finish(lambda: server.in_flight)
    return 0

Nothing here imports torch.
"""
