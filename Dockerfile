# A worker in a container: tasks are mounted at /worker/tasks, a crontab at /worker/crontab.
#
#   docker build -t graphile-worker .
#   docker run --rm -e DATABASE_URL -v "$PWD/tasks":/worker/tasks graphile-worker --jobs 4
#
# Tasks that need more than a shell (Python, Node.js, …) need an image that has it: begin yours with
# `FROM graphile-worker`, `USER root`, install, and end with `USER worker`.

FROM rust:1.94-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p graphile_worker_cli --bin graphile-worker

FROM debian:bookworm-slim
# tini collects what tasks leave behind; the worker itself hears signals as process 1, too.
RUN apt-get update -q \
 && apt-get install -qy --no-install-recommends ca-certificates tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --create-home --uid 10001 worker \
 && mkdir -p /worker/tasks
COPY --from=build /src/target/release/graphile-worker /usr/local/bin/graphile-worker
USER worker
WORKDIR /worker
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "graphile-worker"]
