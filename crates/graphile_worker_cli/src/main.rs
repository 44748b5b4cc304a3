//! The binary `graphile-worker`: see the library beside it.

#[tokio::main]
async fn main() {
    graphile_worker_cli::main().await
}
