// The order of the search's results: questions of users first; names of the API, and the pages for
// maintainers, last. Included by Sphinx, whose defaults it replaces.
var Scorer = {
  score: ([page, title, anchor, text, score]) => {
    if (/^(changelog|benchmarks|explanation\/(architecture|how-we-know|model))$/.test(page)) {
      return score / 10;
    }
    if (page === "troubleshooting") return score + 4;
    return /^(how-to|tutorials)\//.test(page) ? score + 3 : score;
  },
  // With the priority of functions and classes, 5: above a page that has the word in its text, and
  // below one that has it in a heading.
  objNameMatch: 4,
  objPartialMatch: -2,
  objPrio: { 0: 5, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
