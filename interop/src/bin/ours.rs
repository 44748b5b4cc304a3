//! The binary `graphile-worker`, for the tests of this package: cargo tells them where it is.

#[tokio::main]
async fn main() {
    graphile_worker_cli::main().await
}
