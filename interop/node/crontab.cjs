// What Node's parser makes of crontabs: reads a JSON array of {text, year} and prints as many answers, null where it
// refuses one. With a year, it also tells in how many minutes of it the first item fires, and a digest of which.
//   node crontab.cjs PACKAGE
const [, , packageName] = process.argv;
const { parseCrontab } = require(packageName);
const { readFileSync } = require("fs");

// It warns of line breaks in strings; only its verdict is wanted.
console.warn = () => {};

function parsed(text) {
  try {
    return parseCrontab(text);
  } catch {
    return null;
  }
}

const minutes = new Map();

// The digests of all minutes of a year, which the matcher asks for.
function minutesOf(year) {
  if (!minutes.has(year)) {
    const digests = [];
    for (let at = Date.UTC(year, 0, 1); at < Date.UTC(year + 1, 0, 1); at += 60000) {
      const date = new Date(at);
      digests.push({
        min: date.getUTCMinutes(),
        hour: date.getUTCHours(),
        date: date.getUTCDate(),
        month: date.getUTCMonth() + 1,
        dow: date.getUTCDay(),
      });
    }
    minutes.set(year, digests);
  }
  return minutes.get(year);
}

function firings(item, year) {
  const answer = { count: 0, digest: 0 };
  minutesOf(year).forEach((digest, minute) => {
    if (item.match(digest)) {
      answer.count++;
      answer.digest = (Math.imul(answer.digest, 31) + minute) >>> 0;
    }
  });
  return answer;
}

const answers = JSON.parse(readFileSync(0, "utf8")).map(({ text, year }) => {
  const items = parsed(text);
  return (
    items && {
      items: items.map(({ match, task, identifier, options, payload }) => ({
        fields: match.parsedCronMatch,
        task,
        identifier,
        options,
        // As text: it can hold half of a surrogate pair, which not every reader of JSON takes.
        payload: JSON.stringify(payload),
      })),
      firings: year ? firings(items[0], year) : null,
    }
  );
});
console.log(JSON.stringify(answers));
