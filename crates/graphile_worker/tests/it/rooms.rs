//! The modules of the library import each other in one direction, as ARCHITECTURE.md says. Reads the sources; needs no
//! database.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A handler gets a context, which can add jobs of a task.
const MAY_IMPORT_EACH_OTHER: [&str; 3] = ["context", "task", "worker_utils"];

/// Which top-level module imports which, with a place where it does.
type Imports = BTreeMap<String, BTreeMap<String, String>>;

#[test]
fn modules_do_not_import_each_other_in_a_cycle() {
    let cycles: Vec<String> = cycles(&imports()).into_iter().map(|cycle| cycle.join("\n  ")).collect();
    assert!(cycles.is_empty(), "modules import each other in a cycle:\n  {}", cycles.join("\n\n  "));
}

#[test]
fn errors_import_no_other_module() {
    let imports = imports();
    assert!(imports["db"].contains_key("error"), "no imports found: the sources are not read correctly");
    assert_eq!(imports.get("error"), None, "`error` imports other modules");
}

#[test]
fn a_cycle_is_reported_with_the_places_of_its_imports() {
    let mut imports = Imports::new();
    for (from, to) in [("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("task", "context"), ("context", "task")] {
        imports.entry(from.to_owned()).or_default().insert(to.to_owned(), format!("{from}.rs:1"));
    }
    assert_eq!(cycles(&imports), [["a imports b (a.rs:1)", "b imports c (b.rs:1)", "c imports a (c.rs:1)"]]);
}

#[test]
fn imports_are_found_in_every_form() {
    let names = BTreeMap::from([("Error".to_owned(), "error".to_owned())]);
    let found = |module: &[&str], text: &str| -> Vec<String> {
        let modules = ["db", "error", "job", "worker"].map(str::to_owned).into();
        imported(module, text, &modules, &names).into_iter().map(|(name, line)| format!("{name}:{line}")).collect()
    };
    assert_eq!(
        found(&["task"], "use crate::{\n    Error, db::{job, rows},\n    job,\n};"),
        ["error:1", "db:1", "job:1"]
    );
    assert_eq!(found(&["task"], "\nfn f() -> crate::Error { super::db::f() }"), ["error:2", "db:2"]);
    assert_eq!(found(&["db", "rows"], "use super::session;\nuse super::super::job;"), ["db:1", "job:2"]);
    assert_eq!(found(&["db"], "mod sealed {\n    use super::job;\n}"), ["db:2"]);
    assert_eq!(
        found(&["db"], "/// See [`f`](crate::job::f).\n#[cfg(test)]\nmod tests {\n    use crate::job;\n}"),
        [""; 0]
    );
}

/// One cycle of each group of modules that reach each other, apart from the allowed group.
fn cycles(imports: &Imports) -> Vec<Vec<String>> {
    let mut seen = BTreeSet::new();
    let mut cycles = Vec::new();
    for module in imports.keys() {
        let Some(cycle) = way(imports, module, module) else { continue };
        let is_allowed = cycle.iter().all(|module| MAY_IMPORT_EACH_OTHER.contains(&module.as_str()));
        if is_allowed || !seen.insert(cycle.iter().cloned().collect::<BTreeSet<_>>()) {
            continue;
        }
        let next = cycle.iter().cycle().skip(1);
        let step = |(from, to): (&String, &String)| format!("{from} imports {to} ({})", imports[from][to]);
        cycles.push(cycle.iter().zip(next).map(step).collect());
    }
    cycles
}

/// The modules on the shortest way from one module to another, without the last.
fn way(imports: &Imports, from: &str, to: &str) -> Option<Vec<String>> {
    let mut ways = vec![vec![from.to_owned()]];
    let mut reached = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            for next in imports.get(way.last()?).into_iter().flat_map(BTreeMap::keys) {
                if next == to {
                    return Some(way);
                }
                if reached.insert(next.clone()) {
                    longer.push([way.clone(), vec![next.clone()]].concat());
                }
            }
        }
        ways = longer;
    }
    None
}

fn imports() -> Imports {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let names = exported_names(&fs::read_to_string(sources.join("lib.rs")).unwrap());
    let files: Vec<(Vec<String>, PathBuf)> =
        rust_files(&sources).into_iter().map(|file| (module_of(file.strip_prefix(&sources).unwrap()), file)).collect();
    let modules: BTreeSet<String> = files.iter().filter_map(|(module, _)| module.first().cloned()).collect();
    let mut imports = Imports::new();
    for (module, file) in &files {
        let Some(top) = module.first() else { continue };
        let module: Vec<&str> = module.iter().map(String::as_str).collect();
        for (name, line) in imported(&module, &fs::read_to_string(file).unwrap(), &modules, &names) {
            if name != *top {
                let place = format!("src/{}:{line}", file.strip_prefix(&sources).unwrap().display());
                imports.entry(top.clone()).or_default().entry(name).or_insert(place);
            }
        }
    }
    imports
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// `db/rows.rs` is `db::rows`, `db/mod.rs` is `db`, and `lib.rs` is the root.
fn module_of(file: &Path) -> Vec<String> {
    let mut module: Vec<String> =
        file.with_extension("").iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    if module.last().is_some_and(|last| last == "mod" || last == "lib") {
        module.pop();
    }
    module
}

/// The names that `lib.rs` re-exports, each with its module.
fn exported_names(lib: &str) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for statement in lib.split("pub use ").skip(1) {
        let statement = statement.split(';').next().unwrap();
        let module = statement.split("::").next().unwrap();
        let list = statement.rsplit("::").next().unwrap().trim_matches(['{', '}', '\n', ' ']);
        for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            names.insert(name.rsplit(" as ").next().unwrap().to_owned(), module.to_owned());
        }
    }
    names
}

/// The top-level modules that the text of a module names by `crate::` or `super::`, with the lines. Tests may import
/// anything.
fn imported(
    module: &[&str],
    text: &str,
    modules: &BTreeSet<String>,
    names: &BTreeMap<String, String>,
) -> Vec<(String, usize)> {
    let text = code(text);
    let mut found = Vec::new();
    for (start, _) in text.match_indices("crate::").chain(text.match_indices("super::")) {
        let before = &text[..start];
        if before.ends_with(|c: char| c.is_alphanumeric() || c == '_') || before.ends_with("super::") {
            continue;
        }
        let line = before.lines().count().max(1) + usize::from(before.ends_with('\n'));
        let mut rest = &text[start..];
        let mut path = Vec::new();
        if let Some(after) = rest.strip_prefix("crate::") {
            rest = after;
        } else {
            path = module.to_vec();
            path.extend(is_in_inline_module(before).then_some("inline"));
            while let Some(after) = rest.strip_prefix("super::") {
                path.pop();
                rest = after;
            }
        }
        match path.first() {
            Some(top) => found.push(((*top).to_owned(), line)),
            None => found.extend(first_names(rest).into_iter().map(|name| {
                let imported = modules.get(&name).or_else(|| names.get(&name));
                (imported.unwrap_or_else(|| panic!("{module:?}: `{name}` is not in lib.rs")).clone(), line)
            })),
        }
    }
    found.sort_by_key(|(_, line)| *line);
    found
}

/// The text without comments and test modules; lines keep their numbers.
fn code(text: &str) -> String {
    let mut lines = Vec::new();
    let mut is_test = false;
    let mut follows_cfg_test = false;
    for line in text.lines() {
        is_test |= follows_cfg_test && line.starts_with("mod ");
        follows_cfg_test = line == "#[cfg(test)]";
        lines.push(if is_test { "" } else { line.split("//").next().unwrap() });
        is_test &= line != "}";
    }
    lines.join("\n")
}

/// rustfmt puts the end of such a module on a line of its own.
fn is_in_inline_module(before: &str) -> bool {
    let is_start = |line: &str| !line.starts_with([' ', '}']) && line.contains("mod ") && line.ends_with('{');
    before.lines().fold(false, |inside, line| is_start(line) || inside && line != "}")
}

/// The name that a path begins with, or the names of a list: `{Error, db::rows}` gives `Error` and `db`.
fn first_names(path: &str) -> Vec<String> {
    let name = |text: &str| text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let Some(list) = path.strip_prefix('{') else { return vec![name(path)] };
    let mut depth = 1;
    let mut items = vec![String::new()];
    for character in list.chars() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => items.push(String::new()),
            _ => {}
        }
        match depth {
            0 => break,
            _ if character != ',' || depth > 1 => items.last_mut().unwrap().push(character),
            _ => {}
        }
    }
    items.iter().map(|item| name(item)).filter(|name| !name.is_empty()).collect()
}
