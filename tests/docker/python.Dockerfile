# What deploy/docker/Dockerfile expects of python:3.11-slim-bookworm: python and pip at /usr/local/bin.
FROM gpuwatch-test-bookworm:latest
RUN ln -s /usr/bin/python3 /usr/local/bin/python && ln -s /usr/bin/python3 /usr/local/bin/python3
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY pip.conf /etc/pip.conf
CMD ["python3"]
