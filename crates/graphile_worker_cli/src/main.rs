//! The binary `graphile-worker`: see the library beside it.

#[tokio::main]
async fn main() -> std::process::ExitCode {
    graphile_worker_cli::main().await
}
