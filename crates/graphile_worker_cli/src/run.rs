//! Runs jobs until a stop signal, or once: builds the worker's options from the settings, and handles signals while it
//! runs. Merging the settings is left to `settings`, running jobs to the library.

use crate::arguments::Cleanup;
use crate::connection::{self, Database};
use crate::failure::Failure;
use crate::output::print_line;
use crate::settings::RunSettings;
use crate::signals::Signals;
use graphile_worker::{CleanupTask, Worker, WorkerOptions, WorkerRecoveryConfig, parse_crontab};
use graphile_worker_scripts::{HostOptions, TasksDir};
use std::io::ErrorKind;
use std::path::Path;
use tracing::{info, warn};

/// The worker options of the application, or of the plain command line, which has only the tasks folder.
pub(crate) struct Application {
    pub(crate) options: WorkerOptions,
    pub(crate) has_own_tasks: bool,
}

impl Application {
    /// The defaults of Node's command line, plus recovery.
    pub(crate) fn plain() -> Application {
        let options =
            WorkerOptions::default().concurrency(1).worker_recovery(WorkerRecoveryConfig::default().enabled(true));
        Application { options, has_own_tasks: false }
    }
}

/// Starts a worker and runs jobs.
pub(crate) async fn run(
    options: WorkerOptions,
    settings: &RunSettings,
    database: &Database,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let starting = async {
        let mut options = options.database(database.config()).max_pg_conn(settings.max_pool_size);
        if let Some(direct) = &settings.direct_connection {
            options = options.direct_database(database.direct(direct)?);
        }
        Ok(options.schema(database.schema()).init().await?)
    };
    let worker = signals.unless_signalled(starting).await?;
    run_until_done(&worker, settings.once, signals).await
}

/// The first signal lets running jobs finish, the second interrupts and releases them, the third exits at once.
async fn run_until_done(worker: &Worker, once: bool, signals: &mut Signals) -> Result<(), Failure> {
    let mut signals_received = 0;
    let mut running = std::pin::pin!(async { if once { worker.run_once().await } else { worker.run().await } });
    let mut last = 0;
    let ended = loop {
        tokio::select! {
            ended = &mut running => break ended,
            (number, signal) = signals.next() => {
                info!(label = "worker", worker_id = worker.worker_id(), signal, "shutdown requested");
                signals_received += 1;
                last = number;
                if signals_received > 2 {
                    worker.kill_programs();
                    return Err(Failure::Signal(number));
                }
                worker.request_shutdown();
            }
        }
    };
    ended?;
    if let Some(reason) = worker.exit_reason().filter(|_| signals_received == 0) {
        return Err(Failure::NewerRelease(reason.to_owned()));
    }
    if signals_received > 1 { Err(Failure::Signal(last)) } else { Ok(()) }
}

/// The application's options, overridden by the settings. Also checks the tasks folder and the crontab.
pub(crate) fn worker_options(application: Application, settings: &RunSettings) -> Result<WorkerOptions, Failure> {
    let mut options = application.options.listen_os_shutdown_signals(false);
    if let Some(jobs) = settings.jobs {
        options = options.concurrency(jobs);
    }
    if let Some(interval) = settings.poll_interval {
        options = options.poll_interval(interval);
    }
    if let Some(period) = settings.grace_period {
        options = options.shutdown_grace_period(period);
    }
    if let Some(wait) = settings.max_migration_wait {
        options = options.max_migration_wait(wait);
    }
    if let Some(timeout) = settings.startup_timeout {
        options = options.startup_timeout(timeout);
    }
    if let Some(timeout) = settings.answer_timeout {
        options = options.answer_timeout(timeout);
    }
    if let Some(direct) = &settings.direct_connection {
        // `run` uses it; an error in it is reported before anything starts.
        connection::direct(direct)?;
    }
    if settings.no_prepared_statements {
        options = options.use_prepared_statements(false);
    }
    if settings.no_recovery {
        options = options.worker_recovery(WorkerRecoveryConfig::default().enabled(false));
    }
    for limit in &settings.limits {
        options = options.limit(limit.clone());
    }
    options = options.repeatable_tasks(settings.repeatable.iter().map(String::as_str));
    if settings.watch {
        options = options.watch(true);
    }
    if !application.has_own_tasks {
        warn_about_node_config();
    }
    options = with_tasks(options, settings, application.has_own_tasks)?;
    with_crontab(options, settings, application.has_own_tasks)
}

/// Files in the current folder from which Node's worker would read its settings.
pub(crate) fn node_config_files() -> impl Iterator<Item = String> {
    let endings = ["js", "cjs", "mjs", "ts", "cts", "mts"].into_iter();
    endings.map(|ending| format!("graphile.config.{ending}")).filter(|file| Path::new(file).exists())
}

/// Warns users who move from Node's worker that its configuration file has no effect.
fn warn_about_node_config() {
    for file in node_config_files() {
        warn!(
            label = "worker",
            file, "the configuration of Node's worker is not read: use options, environment variables or --config FILE"
        );
    }
}

/// Adds the tasks folder. It may be missing only if the application has its own tasks.
fn with_tasks(options: WorkerOptions, settings: &RunSettings, optional: bool) -> Result<WorkerOptions, Failure> {
    let folder = settings.tasks.path();
    match std::fs::metadata(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Failure::because(format!("could not read the tasks folder {}: {error}", folder.display())))
        }
        Err(_) if optional && settings.tasks.is_default() => Ok(options),
        Err(_) => Err(Failure::because(format!(
            "the tasks folder {} does not exist: create it with one file per task, or use --tasks DIR",
            folder.display()
        ))),
        Ok(_) => Ok(options.task_source(TasksDir::new(folder).host_options(host_options(settings)))),
    }
}

fn host_options(settings: &RunSettings) -> HostOptions {
    let mut hosts = HostOptions::default();
    if let Some(node) = &settings.node {
        hosts = hosts.node(node);
    }
    if let Some(python) = &settings.python {
        hosts = hosts.python(python);
    }
    hosts
}

/// Adds the crontab. The default file may be missing and appear later; a file that the user named may not. The worker
/// reads the file again when it starts; reading it here reports errors before anything else happens.
fn with_crontab(options: WorkerOptions, settings: &RunSettings, optional: bool) -> Result<WorkerOptions, Failure> {
    let path = settings.crontab.path();
    match std::fs::read_to_string(path) {
        // The application may have its own crontab.
        Err(error) if error.kind() == ErrorKind::NotFound && settings.crontab.is_default() && optional => Ok(options),
        Err(error) if error.kind() == ErrorKind::NotFound && settings.crontab.is_default() => {
            Ok(options.crontab_file_if_any(path))
        }
        Err(error) => Err(Failure::because(format!("could not read the crontab {}: {error}", path.display()))),
        Ok(text) => {
            let invalid = |errors| Failure::because(format!("the crontab {} is invalid:\n{errors}", path.display()));
            parse_crontab(&text).map_err(invalid)?;
            // The default file may also disappear.
            Ok(if settings.crontab.is_default() {
                options.crontab_file_if_any(path)
            } else {
                options.crontab_file(path)
            })
        }
    }
}

/// Deletes what `--cleanup` names, and prints the number of deleted rows.
pub(crate) async fn cleanup(tasks: &[Cleanup], database: &Database) -> Result<(), Failure> {
    let tasks: Vec<CleanupTask> = tasks
        .iter()
        .map(|task| match task {
            Cleanup::GcTaskIdentifiers => CleanupTask::GcTaskIdentifiers,
            Cleanup::GcJobQueues => CleanupTask::GcJobQueues,
            Cleanup::DeletePermafailedJobs => CleanupTask::DeletePermanentlyFailedJobs,
        })
        .collect();
    let utils = database.utils(1).await?;
    // Fails if the schema is too new for this release.
    utils.migrate().await?;
    let deleted = utils.cleanup(&tasks).await?;
    print_line(&format!("{deleted} {} deleted", if deleted == 1 { "row" } else { "rows" }))
}
