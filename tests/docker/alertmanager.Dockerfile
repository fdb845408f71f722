# Laid out as the upstream image: binary, configuration, data directory, user and busybox's wget.
FROM gpuwatch-test-bookworm:latest
RUN ln -s /bin/busybox /usr/local/bin/wget \
 && ln -sf /usr/bin/prometheus-alertmanager /bin/alertmanager \
 && mkdir -p /alertmanager /etc/alertmanager && chown 65534:65534 /alertmanager
USER 65534
VOLUME /alertmanager
WORKDIR /alertmanager
EXPOSE 9093
ENTRYPOINT ["/bin/alertmanager"]
