//! Running jobs: a worker from the settings, until it is told to stop, or once. Told a second time, it leaves at once.

use crate::arguments::Cleanup;
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print_line;
use crate::settings::RunSettings;
use crate::signals::Signals;
use graphile_worker::{
    CleanupTask, HostOptions, Worker, WorkerOptions, WorkerRecoveryConfig, WorkerUtils, parse_crontab,
};
use std::io::ErrorKind;
use std::path::Path;
use tracing::{info, warn};

/// The worker that an application describes; or that of the plain command line, which has only the tasks folder.
pub(crate) struct Application {
    pub(crate) options: WorkerOptions,
    pub(crate) has_own_tasks: bool,
}

impl Application {
    /// What Node's command line does by default, but with recovery on.
    pub(crate) fn plain() -> Application {
        let options =
            WorkerOptions::default().concurrency(1).worker_recovery(WorkerRecoveryConfig::default().enabled(true));
        Application { options, has_own_tasks: false }
    }
}

/// Runs jobs.
pub(crate) async fn run(
    options: WorkerOptions,
    settings: &RunSettings,
    database: &Database,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let starting = async {
        let pool = database.lazy_pool(settings.max_pool_size);
        Ok(options.pg_pool(pool).schema(database.schema()).init().await?)
    };
    let worker = signals.unless_told(starting).await?;
    run_until_done(&worker, settings.once, signals).await
}

/// The first signal lets jobs finish, the second hands them back, the third does not even wait for that.
async fn run_until_done(worker: &Worker, once: bool, signals: &mut Signals) -> Result<(), Failure> {
    let mut told = 0;
    let mut running = std::pin::pin!(async { if once { worker.run_once().await } else { worker.run().await } });
    let mut last = 0;
    let ended = loop {
        tokio::select! {
            ended = &mut running => break ended,
            (number, signal) = signals.next() => {
                info!(label = "worker", worker_id = worker.worker_id(), signal, "asked to stop");
                told += 1;
                last = number;
                if told > 2 {
                    worker.kill_programs();
                    return Err(Failure::Signal(number));
                }
                worker.request_shutdown();
            }
        }
    };
    ended?;
    if let Some(reason) = worker.left_because().filter(|_| told == 0) {
        return Err(Failure::SchemaMovesOn(reason.to_owned()));
    }
    if told > 1 { Err(Failure::Signal(last)) } else { Ok(()) }
}

/// The application's worker, with what the settings say over it.
pub(crate) fn describe(application: Application, settings: &RunSettings) -> Result<WorkerOptions, Failure> {
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
    if settings.no_prepared_statements {
        options = options.use_prepared_statements(false);
    }
    if settings.no_recovery {
        options = options.worker_recovery(WorkerRecoveryConfig::default().enabled(false));
    }
    if settings.watch {
        options = options.watch(true);
    }
    if settings.node.is_some() || settings.python.is_some() {
        let mut hosts = HostOptions::default();
        if let Some(node) = &settings.node {
            hosts = hosts.node(node);
        }
        if let Some(python) = &settings.python {
            hosts = hosts.python(python);
        }
        options = options.host_options(hosts);
    }
    if !application.has_own_tasks {
        warn_of_nodes_configuration();
    }
    options = with_tasks(options, settings, application.has_own_tasks)?;
    with_crontab(options, settings, application.has_own_tasks)
}

/// Who comes from Node's worker may have a file of its settings here, and wonder.
fn warn_of_nodes_configuration() {
    let endings = ["js", "cjs", "mjs", "ts", "cts", "mts"];
    let files = endings.map(|ending| format!("graphile.config.{ending}"));
    for file in files.iter().filter(|file| Path::new(file).exists()) {
        warn!(
            label = "worker",
            file, "the configuration of Node's worker is not read here: use flags, the environment or --config FILE"
        );
    }
}

/// Without tasks of the application's own, there has to be a folder of them.
fn with_tasks(options: WorkerOptions, settings: &RunSettings, optional: bool) -> Result<WorkerOptions, Failure> {
    let folder = settings.tasks.path();
    match std::fs::metadata(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Failure::because(format!("the tasks folder {}: {error}", folder.display())))
        }
        Err(_) if optional && settings.tasks.is_usual() => Ok(options),
        Err(_) => Err(Failure::because(format!(
            "there is no folder {} to find tasks in: make it and put a file into it for each task, or name another with --tasks DIR",
            folder.display()
        ))),
        Ok(_) => Ok(options.tasks_dir(folder)),
    }
}

/// The usual crontab may be missing, and come later; one that somebody named may not. The worker reads it again when it
/// starts: here, mistakes are told before anything else is done.
fn with_crontab(options: WorkerOptions, settings: &RunSettings, optional: bool) -> Result<WorkerOptions, Failure> {
    let path = settings.crontab.path();
    let cannot = |problem: String| Failure::because(format!("the crontab {} cannot be {problem}", path.display()));
    match std::fs::read_to_string(path) {
        // The application may have named another.
        Err(error) if error.kind() == ErrorKind::NotFound && settings.crontab.is_usual() && optional => Ok(options),
        Err(error) if error.kind() == ErrorKind::NotFound && settings.crontab.is_usual() => {
            Ok(options.crontab_file_if_any(path))
        }
        Err(error) => Err(cannot(format!("read: {error}"))),
        Ok(text) => {
            parse_crontab(&text).map_err(|mistakes| cannot(format!("used:\n{mistakes}")))?;
            // The usual one may also go away.
            Ok(if settings.crontab.is_usual() { options.crontab_file_if_any(path) } else { options.crontab_file(path) })
        }
    }
}

/// Deletes what is not needed any more, and says how much that was.
pub(crate) async fn cleanup(tasks: &[Cleanup], database: &Database) -> Result<(), Failure> {
    let tasks: Vec<CleanupTask> = tasks
        .iter()
        .map(|task| match task {
            Cleanup::GcTaskIdentifiers => CleanupTask::GcTaskIdentifiers,
            Cleanup::GcJobQueues => CleanupTask::GcJobQueues,
            Cleanup::DeletePermafailedJobs => CleanupTask::DeletePermanentlyFailedJobs,
        })
        .collect();
    let utils = WorkerUtils::new(database.pool(1).await?, database.schema());
    // A schema that is too new for us is not for us to clean.
    utils.migrate().await?;
    let deleted = utils.cleanup(&tasks).await?;
    print_line(&format!("{deleted} {} deleted", if deleted == 1 { "row" } else { "rows" }))
}
