# Laid out as the upstream image: binary, configuration, data directory, user and busybox's wget.
FROM gpuwatch-test-bookworm:latest
RUN ln -s /bin/busybox /usr/local/bin/wget \
 && mkdir -p /prometheus /etc/prometheus && chown 65534:65534 /prometheus
USER 65534
VOLUME /prometheus
WORKDIR /prometheus
EXPOSE 9090
ENTRYPOINT ["/bin/prometheus"]
