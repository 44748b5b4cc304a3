//! `dev`: runs a worker on a private PostgreSQL in ./.graphile-worker, which stops with the worker.
//! `graphile_worker_devdb` starts and stops the server; `run` runs the jobs.

use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print;
use crate::run::{self, Application};
use crate::settings::RunSettings;
use crate::signals::Signals;
use graphile_worker_devdb::{Cluster, ClusterOptions};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

/// The folder of the private PostgreSQL, in the current folder.
pub(crate) const FOLDER: &str = ".graphile-worker";

/// Starts the server, runs jobs until a stop signal, then stops the server.
pub(crate) async fn dev(
    application: Application,
    settings: &RunSettings,
    schema: &str,
    reset: bool,
    signals: &mut Signals,
) -> Result<(), Failure> {
    // Report errors in tasks and the crontab before starting a server.
    let options = run::worker_options(application, settings)?;
    let folder =
        std::env::current_dir().map_err(|error| format!("could not find the current folder: {error}"))?.join(FOLDER);
    let _lock = lock(&folder)?;
    let opening = ClusterOptions::new(&folder).fresh(reset);
    let cluster =
        signals.unless_signalled(async { Ok(tokio::task::spawn_blocking(|| opening.open()).await??) }).await?;
    if std::env::var("DATABASE_URL").as_deref() != Ok(&cluster.url("postgres")) {
        return Err(reexec(&cluster));
    }
    let database = Database::new(cluster.options("postgres"), schema);
    let ended = async {
        signals.unless_signalled(install(&database)).await?;
        print(&greeting(&cluster, schema, &example_task(settings.tasks.path(), settings)))?;
        run::run(options, settings, &database, signals).await
    }
    .await;
    tokio::task::spawn_blocking(|| cluster.stop()).await??;
    ended
}

/// Locks the folder for as long as the returned file is open.
fn lock(folder: &Path) -> Result<File, Failure> {
    let failed = |error: std::io::Error| Failure::because(format!("could not use {}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(failed)?;
    std::fs::write(folder.join(".gitignore"), "*\n").map_err(failed)?;
    let file = File::create(folder.join("dev")).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(_) => Err(Failure::because(format!(
            "another `graphile-worker dev` is running in {}: stop it, or use another folder",
            folder.display()
        ))),
    }
}

/// Restarts this program with environment variables that point to this database, because tasks connect by them. A
/// process with threads cannot change its own environment safely. Returns only on failure.
fn reexec(cluster: &Cluster) -> Failure {
    let options = cluster.options("postgres");
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Failure::because(format!("could not find this program: {error}")),
    };
    let mut command = std::process::Command::new(program);
    command.args(std::env::args_os().skip(1).filter(|argument| argument != "--reset"));
    for variable in ["PGHOSTADDR", "PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSSLMODE", "PGOPTIONS"] {
        command.env_remove(variable);
    }
    if let Some(socket) = options.get_socket() {
        command.env("PGHOST", socket);
    }
    command.env("PGPORT", options.get_port().to_string()).env("PGUSER", "postgres").env("PGDATABASE", "postgres");
    command.env("DATABASE_URL", cluster.url("postgres"));
    Failure::because(format!("could not restart this program: {}", command.exec()))
}

async fn install(database: &Database) -> Result<(), Failure> {
    let mut connection = database.connect().await?;
    graphile_worker::migrate(&mut connection, database.schema()).await?;
    let _ = sqlx::Connection::close(connection).await;
    Ok(())
}

/// The name of a task that can run, so that the printed example works when you paste it.
fn example_task(folder: &Path, settings: &RunSettings) -> String {
    let mut names = Vec::new();
    collect(folder, "", settings, &mut names);
    names.into_iter().min().unwrap_or_else(|| "hello".to_owned())
}

fn collect(folder: &Path, prefix: &str, settings: &RunSettings, names: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, file) = (entry.path(), entry.file_name());
        let Some(file) = file.to_str().filter(|file| *file != "node_modules" && *file != "__pycache__") else {
            continue;
        };
        let is_name =
            |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        if !file.split('.').all(is_name) {
            continue;
        }
        let (name, extension) = file.split_once('.').unwrap_or((file, ""));
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&path, &format!("{prefix}{file}/"), settings, names);
        } else if can_run(&path, extension, settings) {
            names.push(format!("{prefix}{name}"));
        }
    }
}

/// Whether this machine can probably run the file: it has a run bit and an interpreter that exists.
fn can_run(path: &Path, extension: &str, settings: &RunSettings) -> bool {
    let Ok(found) = std::fs::metadata(path) else { return false };
    let has_run_bit = found.permissions().mode() & 0o111 != 0;
    let exists =
        |named: &Option<PathBuf>, default: &str| program_exists(named.as_deref().unwrap_or(Path::new(default)));
    match extension {
        "js" | "cjs" | "mjs" => exists(&settings.node, "node"),
        // Not every release of Node runs TypeScript.
        "ts" | "mts" => false,
        "py" if !has_run_bit => exists(&settings.python, "python3"),
        _ => found.is_file() && has_run_bit && has_interpreter(path),
    }
}

/// Whether the program in the `#!` line exists. Without such a line, whether the file looks binary.
fn has_interpreter(path: &Path) -> bool {
    let mut beginning = [0; 256];
    let Ok(length) = File::open(path).and_then(|mut file| file.read(&mut beginning)) else { return false };
    let beginning = &beginning[..length];
    let Some(line) = beginning.strip_prefix(b"#!") else { return beginning.contains(&0) };
    let line = String::from_utf8_lossy(line.split(|byte| *byte == b'\n').next().unwrap_or_default()).into_owned();
    let mut words = line.split_whitespace();
    let Some(program) = words.next() else { return false };
    let wanted = words.find(|word| !word.starts_with('-') && !word.contains('='));
    let is_env = Path::new(program).file_name().is_some_and(|name| name == "env");
    program_exists(Path::new(program)) && (!is_env || wanted.is_some_and(|wanted| program_exists(Path::new(wanted))))
}

/// Whether the program exists, at its path or on the PATH.
fn program_exists(program: &Path) -> bool {
    if program.components().count() > 1 {
        return program.exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

fn greeting(cluster: &Cluster, schema: &str, task: &str) -> String {
    let plain = schema.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && schema.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let quoted = if plain { schema.to_owned() } else { format!("\"{}\"", schema.replace('"', "\"\"")) };
    let options = cluster.options("postgres");
    // The socket needs no password, so psql's command line does not show one.
    let socket = options.get_socket().map(|socket| socket.display().to_string()).unwrap_or_default();
    format!(
        "PostgreSQL runs in {folder} until this command stops. For your application and other terminals:\n\n\
         \x20   export DATABASE_URL='{url}'\n\n\
         To add a job:\n\n\
         \x20   {program} add {task} '{{\"name\": \"world\"}}'\n\n\
         or in psql:\n\n\
         \x20   psql -h '{socket}' -p {port} -U postgres\n\
         \x20   select {quoted}.add_job('{task}', '{{\"name\": \"world\"}}');\n\n",
        folder = cluster.folder().display(),
        url = cluster.url("postgres"),
        program = graphile_worker::program(schema),
        port = options.get_port(),
    )
}
