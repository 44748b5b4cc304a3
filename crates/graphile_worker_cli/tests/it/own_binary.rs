//! An application with the command line compiled in (examples/own_binary.rs).

use crate::support::{Folder, Running, empty_database, example, failure_of, run_sql, texts, value};

#[tokio::test]
async fn it_runs_its_own_tasks_and_needs_no_folder() {
    let (database, folder) = (empty_database().await, Folder::new());
    let mut command = example("own_binary", &[]);
    command.current_dir(folder.path()).env("DATABASE_URL", database.url());
    let mut worker = Running::start(command);
    worker.line(&["connected and waiting for jobs", "hello"]);
    run_sql(&database, "select graphile_worker.add_job('hello', '\"world\"')").await;
    worker.line(&["Hello, world"]);
    worker.line(&["[job 1 hello] INFO: job completed"]);
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(0));
}

#[tokio::test]
async fn it_has_the_other_commands_too() {
    let (database, folder) = (empty_database().await, Folder::new());
    let migrated = example("own_binary", &["migrate", "-s", "mine", "-c", database.url()]).output().unwrap();
    assert!(texts(&migrated).0.starts_with("schema \"mine\" installed at level 20"), "{migrated:?}");
    assert_eq!(value(&database, "select to_regclass('mine._private_jobs') is not null").await, true);
    let mut command = example("own_binary", &["--tasks", "none", "-c", database.url()]);
    command.current_dir(folder.path());
    let (code, line) = failure_of(command);
    assert_eq!(code, 1);
    assert!(line.contains("the tasks folder none does not exist"), "{line}");
}
