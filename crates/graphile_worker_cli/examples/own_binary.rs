//! The whole command line with a task of your own compiled in: try `--help`, `dev`, `dev --once`.

use graphile_worker::{WorkerContext, WorkerOptions};

#[tokio::main]
async fn main() {
    let options = WorkerOptions::default()
        .define_task("hello", |name: String, _ctx: WorkerContext| async move { println!("Hello, {name}") });
    graphile_worker_cli::main_with(options).await
}
