//! The full command line with your own task. Try `--help`, `dev` or `dev --once`.

use graphile_worker::{WorkerContext, WorkerOptions, WorkerRecoveryConfig};

#[tokio::main]
async fn main() {
    let options = WorkerOptions::default()
        .worker_recovery(WorkerRecoveryConfig::default().enabled(true))
        .define_task("hello", |name: String, _ctx: WorkerContext| async move { println!("Hello, {name}") });
    graphile_worker_cli::main_with(options).await
}
