//! The binary `graphile-worker`. So far it installs the schema; see the library beside it.

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::process::ExitCode {
    graphile_worker_cli::main().await
}
