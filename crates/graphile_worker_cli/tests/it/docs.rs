//! The README and the guide are true: every snippet is compiled, run or parsed, every link leads somewhere, every figure was
//! measured. Rust snippets are compiled by the library's documentation tests (`guide` in `graphile_worker/src/lib.rs`);
//! everything else is checked here.

use crate::support::{
    Folder, clean, empty_database, graphile_worker, installed_database, one_line, run_sql, texts, value,
};
use graphile_worker_devdb::TestDatabase;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The database of the snippets; the tests put their own in its place.
const URL: &str = "postgres://user:password@localhost/my_app";

/// How each kind of snippet is checked. `text` is output, or what is not meant to be run.
const LANGUAGES: [&str; 12] =
    ["console", "crontab", "js", "python", "rust", "rust,ignore", "rust,no_run", "sh", "sql", "text", "toml", "ts"];

/// A page of the documentation.
struct Page {
    /// Relative to the root of the repository.
    path: String,
    text: String,
}

/// What stands between two fences.
struct Snippet {
    language: String,
    text: String,
}

impl Page {
    fn read(path: &str) -> Page {
        let text = std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        Page { path: path.to_owned(), text }
    }

    fn snippets(&self) -> Vec<Snippet> {
        let mut snippets = Vec::new();
        let mut lines = self.text.lines();
        while let Some(line) = lines.next() {
            let Some((indent, language)) = line.split_once("```").filter(|(indent, _)| indent.trim().is_empty()) else {
                continue;
            };
            let inside = lines.by_ref().take_while(|line| line.trim() != "```");
            let text: String = inside.map(|line| line.strip_prefix(indent).unwrap_or(line).to_owned() + "\n").collect();
            snippets.push(Snippet { language: language.to_owned(), text });
        }
        snippets
    }

    fn snippets_in(&self, language: &str) -> Vec<String> {
        let snippets = self.snippets().into_iter();
        snippets.filter(|snippet| snippet.language == language).map(|snippet| snippet.text).collect()
    }

    /// The rows of the table whose head begins like this.
    fn table(&self, head: &str) -> Vec<&str> {
        let (_, rows) = self.text.split_once(head).unwrap_or_else(|| panic!("{} has no table {head}", self.path));
        rows.lines().skip(2).take_while(|line| line.starts_with('|')).collect()
    }

    /// The anchors of its headings, as GitHub makes them.
    fn anchors(&self) -> BTreeSet<String> {
        let headings = self.text.lines().filter_map(|line| Some(line.strip_prefix('#')?.trim_start_matches('#')));
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        headings
            .map(|heading| heading.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-"))
            .collect()
    }

    /// The targets of its links and images, without those in code.
    fn links(&self) -> Vec<String> {
        let mut is_code = false;
        let prose = self.text.lines().filter(|line| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            !is_code && !is_fence
        });
        let prose = prose.collect::<Vec<_>>().join("\n");
        prose.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())).collect()
    }
}

/// The README and the guide.
fn pages() -> Vec<Page> {
    let guide = std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut paths: Vec<String> = guide.map(|name| format!("docs/{}", name.into_string().unwrap())).collect();
    paths.retain(|path| Path::new(path).extension().is_some_and(|extension| extension == "md"));
    paths.push("README.md".to_owned());
    paths.sort();
    paths.iter().map(|path| Page::read(path)).collect()
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

#[test]
fn every_snippet_is_of_a_kind_that_is_checked() {
    let doctests = std::fs::read_to_string(root().join("crates/graphile_worker/src/lib.rs")).unwrap();
    for page in pages() {
        for Snippet { language, text } in page.snippets() {
            assert!(LANGUAGES.contains(&&*language), "{}: `{language}` is not checked:\n{text}", page.path);
            let is_compiled = doctests.contains(&format!("\"../../../{}\"", page.path));
            assert!(!language.starts_with("rust") || is_compiled, "{} is not in `guide` of lib.rs", page.path);
        }
    }
}

#[test]
fn the_program_with_the_command_line_is_the_example() {
    let example = std::fs::read_to_string(root().join("crates/graphile_worker_cli/examples/own_binary.rs")).unwrap();
    let programs: Vec<String> = pages().iter().flat_map(|page| page.snippets_in("rust,ignore")).collect();
    assert!(!programs.is_empty());
    for program in programs {
        assert!(example.ends_with(&program), "{program}");
    }
}

/// In place of the real one: a worker runs once, and not for ever.
const ONCE: &str = r#"#!/bin/sh
case " $* " in
  *" --once "* | *" --schema-only "* | *" --cleanup "* | *" --help "*) exec "$BINARY" "$@" ;;
esac
case "$1" in
  "" | -* | dev) exec "$BINARY" "$@" --once ;;
  *) exec "$BINARY" "$@" ;;
esac
"#;

/// A project with a task `hello`, and a shell in it.
struct Project {
    folder: Folder,
    database: TestDatabase,
}

impl Project {
    async fn new() -> Project {
        let folder = Folder::new();
        folder.script("bin/graphile-worker", ONCE);
        folder.script("tasks/hello", "#!/bin/sh\n");
        Project { folder, database: installed_database().await }
    }

    /// What the snippet writes to standard output and standard error.
    fn run(&self, snippet: &str) -> (String, String) {
        let path = format!("{}:{}", self.folder.path().join("bin").display(), std::env::var("PATH").unwrap());
        let mut shell = clean(Command::new("sh"), &["-eu", "-c", &snippet.replace(URL, self.database.url())]);
        shell.current_dir(self.folder.path()).env("PATH", path).env("DATABASE_URL", self.database.url());
        shell.env("BINARY", graphile_worker(&[]).get_program());
        let output = shell.output().unwrap();
        let (stdout, stderr) = texts(&output);
        assert!(output.status.success(), "{snippet}\n{stdout}{stderr}");
        (stdout, stderr)
    }
}

#[tokio::test]
async fn shell_commands_succeed() {
    let mut running = Vec::new();
    for page in pages() {
        let snippets = page.snippets_in("sh");
        if !snippets.is_empty() {
            let project = Project::new().await;
            // The snippets of a page build on each other, those of two pages do not.
            running.push(tokio::task::spawn_blocking(move || {
                for snippet in snippets {
                    project.run(&snippet);
                }
                drop(project);
            }));
        }
    }
    assert!(running.len() > 8, "most pages have commands");
    for page in running {
        page.await.unwrap();
    }
}

#[tokio::test]
async fn the_first_task_logs_what_is_shown() {
    let page = Page::read("docs/getting-started-tasks-folder.md");
    let project = Project::new().await;
    project.run(&page.snippets_in("sh")[0]);
    run_sql(&project.database, &page.snippets_in("sql")[0]).await;
    let (_, log) = project.run("graphile-worker");
    let shown = page.text.lines().find(|line| line.contains("INFO: hello, I was given")).unwrap();
    assert!(log.lines().any(|line| line == shown), "{shown} is not in:\n{log}");
}

#[tokio::test]
async fn why_explains_as_shown() {
    let page = Page::read("docs/operating.md");
    let project = Project::new().await;
    let (explained, _) = project.run(&page.snippets_in("sh")[0]);
    // How much time is left depends on how long the commands took.
    let timeless = |text: &str| {
        let words = text.split_whitespace().filter(|word| !word.starts_with(|c: char| c.is_ascii_digit()));
        words.collect::<Vec<_>>().join(" ")
    };
    // Without a worker, the command says one thing more.
    for line in page.snippets_in("text")[0].lines() {
        assert!(timeless(&explained).contains(&timeless(line)), "{line} is not in:\n{explained}");
    }
}

#[tokio::test]
async fn errors_of_a_crontab_look_as_shown() {
    let page = Page::read("docs/recurring-jobs.md");
    let folder = Folder::new();
    folder.write("crontab", "\n\n61 4 * * 1 send_weekly_email\n");
    let (stdout, stderr) = texts(&folder.graphile_worker(&["crontab", "check", "crontab"]).output().unwrap());
    assert!(
        (stdout.clone() + &stderr).contains(page.snippets_in("text")[0].trim_start_matches("crontab ")),
        "{stdout}{stderr}"
    );
}

#[tokio::test]
async fn sql_runs() {
    for page in pages() {
        let snippets = page.snippets_in("sql");
        if snippets.is_empty() {
            continue;
        }
        let database = installed_database().await;
        run_sql(&database, "create table users (email text)").await;
        for snippet in snippets {
            run_sql(&database, &snippet).await;
        }
        if page.text.contains("create trigger welcome") {
            let before = value(&database, "select count(*) from graphile_worker.jobs").await;
            run_sql(&database, "insert into users values ('user@example.com')").await;
            let after = value(&database, "select count(*) from graphile_worker.jobs").await;
            assert_eq!(after.as_i64().unwrap(), before.as_i64().unwrap() + 1, "the trigger has added a job");
        }
    }
}

/// What stands in for the drivers `pg` and `psycopg`, which a project brings.
const PG: &str = "exports.Pool = class {
  on() {}
  async end() {}
  async connect() { return { release() {}, query: async () => ({ rows: [{ email: 'user@example.com' }] }) }; }
};";
const PSYCOPG: &str = "
import os, types
rows = types.SimpleNamespace(dict_row=None)
pq = types.SimpleNamespace(TransactionStatus=types.SimpleNamespace(IDLE=0))
class Cursor:
    description = True
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def execute(self, sql, values): pass
    def fetchall(self): return [{'users': 3}]
class Connection:
    closed = False
    info = types.SimpleNamespace(transaction_status=0)
    def __init__(self): self.pipe = os.pipe()
    def fileno(self): return self.pipe[0]
    def cursor(self, row_factory): return Cursor()
    def close(self): self.closed = True
def connect(url, autocommit, **_): return Connection()
";

#[tokio::test]
async fn scripts_run_as_tasks() {
    let (database, folder) = (installed_database().await, Folder::new());
    folder.write("node_modules/pg/index.js", PG);
    folder.write("modules/psycopg.py", PSYCOPG);
    let is_new_node = strips_types();
    let mut tasks = BTreeMap::new();
    for (page, language) in pages().iter().flat_map(|page| ["js", "ts", "python"].map(|language| (page, language))) {
        for script in page.snippets_in(language) {
            let file = script.lines().next().unwrap().trim_start_matches(['/', '#', ' ']);
            let name = file.strip_prefix("tasks/").unwrap_or_else(|| panic!("no file is named in:\n{script}"));
            folder.write(file, &script);
            if language != "ts" || is_new_node {
                tasks.insert(name.split('.').next().unwrap().to_owned(), page.path.clone());
            }
        }
    }
    for task in tasks.keys() {
        let payload = r#"{"name": "world", "email": "user@example.com"}"#;
        run_sql(&database, &format!("select graphile_worker.add_job('{task}', '{payload}')")).await;
    }
    let mut worker = folder.graphile_worker(&["--once"]);
    worker.env("DATABASE_URL", database.url()).env("PYTHONPATH", folder.path().join("modules"));
    let (_, log) = texts(&worker.output().unwrap());
    for (task, page) in &tasks {
        assert!(log.contains(&format!(" {task}] INFO: job completed")), "{task} of {page}:\n{log}");
    }
    let added = "select json_agg(distinct task_identifier) from graphile_worker.jobs";
    assert_eq!(value(&database, added).await, serde_json::json!(["mail/send", "send_email"]), "{log}");
}

/// Whether Node runs TypeScript.
fn strips_types() -> bool {
    let version = Command::new("node").arg("--version").output().unwrap().stdout;
    let version = String::from_utf8(version).unwrap();
    let mut numbers = version.trim().trim_start_matches('v').split('.').map(|number| number.parse::<u32>().unwrap());
    (numbers.next(), numbers.next()) >= (Some(22), Some(6))
}

#[tokio::test]
async fn toml_is_a_configuration_file_or_dependencies() {
    let workspace: toml::Table = std::fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    let version = |dependencies: &toml::Value, name: &str| {
        let asked = dependencies.get(name)?;
        Some(asked.get("version").unwrap_or(asked).as_str()?.to_owned())
    };
    for page in pages() {
        for file in page.snippets_in("toml") {
            let parsed: toml::Table = file.parse().unwrap();
            if let Some(dependencies) = parsed.get("dependencies") {
                let path = dependencies["graphile_worker"]["path"].as_str().unwrap();
                assert!(root().join(&path[path.find("crates/").unwrap()..]).is_dir(), "{path}");
                let ours = version(&workspace["workspace"]["dependencies"], "sqlx");
                assert_eq!(version(dependencies, "sqlx"), ours, "another sqlx has other types");
                continue;
            }
            let (database, folder) = (empty_database().await, Folder::new());
            folder.write("worker.toml", &file.replace(URL, database.url()));
            std::fs::create_dir(folder.path().join("tasks")).unwrap();
            let output = folder.graphile_worker(&["--config", "worker.toml", "--once"]).output().unwrap();
            assert!(output.status.success(), "{}", texts(&output).1);
        }
    }
}

#[test]
fn crontabs_are_valid() {
    let folder = Folder::new();
    for crontab in pages().iter().flat_map(|page| page.snippets_in("crontab")) {
        folder.write("crontab", &crontab);
        let output = folder.graphile_worker(&["crontab", "check", "crontab"]).output().unwrap();
        assert!(output.status.success(), "{crontab}\n{}", texts(&output).1);
    }
}

/// Commands for another machine, or that take minutes, are parsed.
#[test]
fn commands_that_are_not_run_exist() {
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap();
    for line in pages().iter().flat_map(|page| page.snippets_in("console")).flat_map(|text| commands(&text)) {
        let programs = ["make", "cargo", "docker", "graphile-worker"];
        // Variables may come first.
        let words: Vec<&str> = line.split_whitespace().skip_while(|word| !programs.contains(word)).collect();
        let after = |flag: &str| words.iter().skip_while(|word| **word != flag).nth(1).copied();
        match *words.first().unwrap_or_else(|| panic!("{line} is not checked")) {
            "make" => assert!(makefile.contains(&format!("\n{}: ", words[1])), "{line}"),
            "cargo" => {
                let package = after("--path").or(after("-p")).unwrap_or_else(|| panic!("{line}"));
                let folder = root().join("crates").join(package.trim_start_matches("crates/"));
                assert!(folder.join("Cargo.toml").exists(), "{line}");
            }
            "docker" => {
                assert!(root().join("Dockerfile").exists(), "{line}");
                if words[1] == "run" {
                    is_accepted(line.split_once(" graphile-worker ").unwrap().1);
                }
            }
            "graphile-worker" => is_accepted(line.split_once("graphile-worker ").unwrap().1),
            other => panic!("{other} is not checked"),
        }
    }
}

/// One for each command, without comments; those of several lines end with a backslash.
fn commands(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    joined.lines().map(|line| line.split(" # ").next().unwrap().to_owned()).filter(|line| !line.is_empty()).collect()
}

/// The arguments are ours.
fn is_accepted(arguments: &str) {
    let arguments: Vec<&str> = arguments.split_whitespace().chain(["--help"]).collect();
    let output = graphile_worker(&arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", texts(&output).1);
}

#[test]
fn the_options_are_those_of_help_with_their_defaults() {
    let page = Page::read("docs/command-line.md");
    let help = texts(&graphile_worker(&["--help"]).output().unwrap()).0;
    let long = help.lines().filter(|line| line.trim_start().starts_with('-')).count();
    let help = one_line(&help);
    let rows = page.table("| option | default | meaning |");
    for row in &rows {
        for flag in row.split('`').filter(|part| part.starts_with("--")) {
            assert!(help.contains(flag.split(' ').next().unwrap()), "{flag} is not in --help");
        }
        let default = row.split('|').nth(2).unwrap().trim().trim_matches('`');
        if !default.is_empty() && default.chars().all(char::is_alphanumeric) {
            assert!(help.contains(&format!("[default: {default}")), "{row}");
        }
    }
    assert_eq!(long, rows.len() + 2, "all but --help and --version are in the table");
}

#[test]
fn every_command_is_in_the_table() {
    let page = Page::read("docs/command-line.md");
    let help = texts(&graphile_worker(&["--help"]).output().unwrap()).0;
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let named = commands.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.strip_prefix("  "));
    let names: Vec<&str> =
        named.filter(|line| !line.starts_with(' ')).filter_map(|line| line.split(' ').next()).collect();
    assert!(names.len() > 20, "{names:?}");
    let rows = page.table("| command | effect |").join("\n");
    for name in names.into_iter().filter(|name| *name != "help") {
        let is_there = rows.contains(&format!("`{name}`")) || rows.contains(&format!("`{name} "));
        assert!(is_there, "`{name}` is not in the table");
    }
}

#[test]
fn figures_are_those_that_were_measured() {
    let results = std::fs::read_to_string(root().join("bench/RESULTS.md")).unwrap();
    let was_measured = |figure: &str, place: &str| {
        assert!(results.contains(&format!("| {figure} ")), "{figure} of {place} is not in bench/RESULTS.md");
    };
    for page in [Page::read("README.md"), Page::read("docs/performance.md")] {
        let rows = page.table("| | this one |");
        let figures = rows.iter().flat_map(|row| row.split('|').skip(2)).flat_map(str::split_whitespace);
        let figures: Vec<&str> = figures.map(|figure| figure.trim_matches(['(', ')'])).collect();
        assert!(figures.len() > 20, "{figures:?}");
        figures.iter().for_each(|figure| was_measured(figure, &page.path));
    }
    let plot = std::fs::read_to_string(root().join("docs/drain.svg")).unwrap();
    let texts = plot.split("</text>").filter_map(|text| text.rsplit_once('>').map(|(_, text)| text));
    let figures: Vec<&str> = texts.filter(|text| text.starts_with(|c: char| c.is_ascii_digit())).collect();
    assert_eq!(figures.len(), 5, "{figures:?}");
    figures.iter().for_each(|figure| was_measured(figure, "docs/drain.svg"));
}

#[test]
fn the_readme_is_short_and_the_guide_lists_all_its_pages() {
    let words = Page::read("README.md").text.split_whitespace().count();
    assert!(words <= 900, "the README has {words} words, expected at most 900: the guide has room");
    let links: BTreeSet<String> = Page::read("docs/README.md").links().into_iter().collect();
    for page in pages() {
        let name = page.path.strip_prefix("docs/").unwrap_or("README.md");
        assert!(name == "README.md" || links.contains(name), "docs/README.md does not link to {name}");
    }
}

/// Every Markdown file of the repository, and every other file by its path.
fn files() -> Vec<PathBuf> {
    fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.file_name();
            let is_ours = !["target", "node_modules", "python_modules", ".git"].iter().any(|other| name == *other);
            match entry.file_type().unwrap().is_dir() {
                true if is_ours => walk(&entry.path(), files),
                true => {}
                false => files.push(entry.path().strip_prefix(root()).unwrap().to_owned()),
            }
        }
    }
    let mut files = Vec::new();
    walk(root(), &mut files);
    files
}

#[test]
fn links_lead_somewhere() {
    let pages = files().into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let mut links = 0;
    for page in pages.map(|path| Page::read(path.to_str().unwrap())) {
        for link in page.links().into_iter().filter(|link| !link.contains("://")) {
            links += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => PathBuf::from(&page.path),
                file => Path::new(&page.path).parent().unwrap().join(file),
            };
            assert!(root().join(&target).exists(), "{}: {link} does not exist", page.path);
            if !anchor.is_empty() {
                let anchors = Page::read(target.to_str().unwrap()).anchors();
                assert!(anchors.contains(anchor), "{}: {link} is none of {anchors:?}", page.path);
            }
        }
    }
    assert!(links > 60, "{links}");
}

#[test]
fn files_that_contributors_are_sent_to_exist() {
    let files = files();
    for page in [Page::read("ARCHITECTURE.md"), Page::read("CONTRIBUTING.md")] {
        let code = page.text.split('`').skip(1).step_by(2);
        let is_file = |word: &&str| {
            let endings = [".rs", ".sql", ".sh", ".md", ".cjs", ".py"];
            let is_name = !word.starts_with('.') && !word.contains(['*', ' ', '…']);
            is_name && endings.iter().any(|ending| word.ends_with(ending))
        };
        for file in code.filter(is_file) {
            assert!(files.iter().any(|known| known.ends_with(file)), "{}: there is no {file}", page.path);
        }
    }
}

/// The table says which line of the engine stands behind a rule of the model. A name that is gone sends its reader nowhere.
#[test]
fn rules_of_the_model_name_code_that_exists() {
    let engine = sources(&["crates/graphile_worker/src", "crates/graphile_worker/sql"]);
    let model = sources(&["model/src"]);
    let page = Page::read("model/README.md");
    let rows = page.table("| rule of the model |");
    assert!(rows.len() > 20, "the table of the model has {} rows", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.split(" | ").collect();
        for name in codes(cells[1]).flat_map(names) {
            assert!(model.iter().any(|(_, text)| has_word(text, name)), "the model has no {name}: {row}");
        }
        let mut file = None;
        for code in codes(cells[2]) {
            let is_file = |word: &str| word.ends_with(".rs") || word.ends_with(".sql");
            let (path, rest) = code.split_once(": ").unwrap_or(if is_file(code) { (code, "") } else { ("", code) });
            if !path.is_empty() {
                file = engine.iter().find(|(known, _)| known.ends_with(path));
                assert!(file.is_some(), "there is no {path}: {row}");
            }
            let (path, text) = file.unwrap_or_else(|| panic!("{code} has no file: {row}"));
            for name in names(rest) {
                assert!(has_word(text, name), "{} has no {name}: {row}", path.display());
            }
        }
    }
}

/// The walk of a job is a list of files with functions. Each function is defined in one of these files. The walk stays
/// short: a reader comes back to few files.
#[test]
fn the_walk_of_a_job_is_short_and_its_functions_exist() {
    let page = Page::read("ARCHITECTURE.md");
    let rows: Vec<Vec<&str>> =
        page.table("| step | file |").iter().map(|row| row.split(" | ").collect::<Vec<_>>()).collect();
    let engine = sources(&["crates/graphile_worker/src", "crates/graphile_worker/sql"]);
    let files: BTreeSet<&str> = rows.iter().flat_map(|cells| codes(cells[1])).collect();
    let walk: Vec<&String> =
        engine.iter().filter(|(path, _)| files.iter().any(|file| path.ends_with(file))).map(|(_, text)| text).collect();
    assert_eq!(walk.len(), files.len(), "each of {files:?} is one file");
    let rust = files.iter().filter(|file| file.ends_with(".rs")).count();
    assert!(rust <= 10, "the walk has {rust} files in Rust");
    for name in rows.iter().flat_map(|cells| codes(cells[2])).filter(|code| !code.contains('.')).flat_map(names) {
        let definitions = [format!("fn {name}"), format!("struct {name}"), format!("function :\"schema\".{name}")];
        let is_defined = |text: &&String| definitions.iter().any(|definition| text.contains(definition));
        assert!(walk.iter().any(is_defined), "no file of the walk defines {name}");
    }

    let moves = page.snippets_in("text").into_iter().find(|text| text.starts_with("worker_utils →"));
    let moves = moves.expect("the walk, move by move");
    let mut seen = BTreeSet::new();
    let back = moves.split(['→', '\n']).map(str::trim).filter(|file| !file.is_empty() && !seen.insert(*file)).count();
    let names = files.iter().map(|file| file.rsplit('/').next().unwrap_or(file).trim_end_matches(".rs"));
    let sql = ["add_job.sql", "110-functions.sql", "claim_head.sql", "exchange_unqueued.sql"];
    assert_eq!(seen, names.filter(|name| !name.ends_with(".sql")).chain(sql).collect::<BTreeSet<_>>());
    assert!(back <= 25, "the walk comes back {back} times");
    assert!(page.text.contains(&format!("you come back {back} times")), "the walk comes back {back} times");
}

/// The texts of all files below these folders, with their paths.
fn sources(folders: &[&str]) -> Vec<(PathBuf, String)> {
    let is_below = |file: &&PathBuf| folders.iter().any(|folder| file.starts_with(folder));
    let files = files();
    let read = |file: &PathBuf| (file.clone(), std::fs::read_to_string(root().join(file)).unwrap());
    files.iter().filter(is_below).map(read).collect()
}

/// What stands between backticks.
fn codes(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// The identifiers of a piece of code.
fn names(code: &str) -> impl Iterator<Item = &str> {
    let words = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    words.filter(|word| word.len() > 1 && !word.starts_with(|c: char| c.is_ascii_digit()))
}

fn has_word(text: &str, name: &str) -> bool {
    names(text).any(|word| word == name)
}
