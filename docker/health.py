"""Is a container well? ``health.py https://HOST:PORT CA`` or ``health.py grpc HOST:PORT``; exits with 0 if so."""

import ssl
import sys
import urllib.request


def main() -> int:
    """Ask, and tell by the exit code."""
    if sys.argv[1] == "grpc":
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(sys.argv[2]) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1
    context = ssl.create_default_context(cafile=sys.argv[2]) if len(sys.argv) > 2 else None
    with urllib.request.urlopen(f"{sys.argv[1]}/health", timeout=5, context=context) as reply:
        return 0 if reply.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
